"""bench/scaling: the model's numbers, the routing, the command on this machine and a fake one."""

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parents[2]
SCALING = ROOT / "bench" / "scaling"
MOK = Path(os.environ.get("MOK_BIN", ROOT / "build" / "cpu" / "mok"))
FAKE = Path(__file__).with_name("fake_gpus.py")
# Prints a line for each problem; ends at the first one of EP 4.
FAKE_PRODUCTS = """
import sys
for problem in sys.stdin:
    name, tokens, ranks, ids = problem.split(":", 3)
    if ranks == "4":
        sys.exit("no products at EP 4")
    print(f"products-only {name} T={tokens} EP={ranks}: forward 0.5 ms, backward 2 ms", flush=True)
"""

needs_mok = pytest.mark.skipif(not MOK.exists(), reason=f"{MOK} is not built")


@pytest.fixture
def load(monkeypatch):
    """Imports a file of bench/scaling, which is run as a program and is no package."""
    monkeypatch.syspath_prepend(SCALING)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(SCALING) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def model(load):
    return load("model")


# Model ----------------------------------------------------------------------------------------


def work(model, **changes):
    sizes = {"hidden": 10, "intermediate": 20, "tokens": 5, "topk": 2, "ranks": 1, "experts": 3}
    return model.Work(**(sizes | {"tiles": 4, "link_bytes": 0} | changes))


def rates(model, **changes):
    base = {"matrix": 1e8, "hbm": 1e6, "link": 1e4, "exposed": 0.25, "schedule_s": 1e-3}
    return model.Rates(**(base | changes))


def test_products_of_the_model(model):
    # 6 * 128 rows * 4 tiles * 200 = 614400 operations; 3 * 3 * 200 weights of 2 bytes.
    forward, backward = work(model), work(model, backward=True)
    assert model.products_s(forward, rates(model)) == pytest.approx(6.144e-3)
    assert model.products_s(forward, rates(model, matrix=1e9)) == pytest.approx(3.6e-3)
    assert model.products_s(backward, rates(model)) == pytest.approx(6.144e-3 * 2 + 3.6e-3)
    # Gate and up of two tiles: 4 * 256 rows * 200.
    again = work(model, backward=True, recomputed_tiles=2)
    assert model.products_s(again, rates(model)) == pytest.approx(6.144e-3 * 2 + 3.6e-3 + 2.048e-3)


def test_rest_of_the_model(model):
    # 5 tokens * (2 + 1) rows of 20 bytes; with peers x is read and written, in backward d_y too.
    assert model.rest_s(work(model), rates(model)) == pytest.approx(1e-3 + 300e-6)
    assert model.rest_s(work(model, ranks=2), rates(model)) == pytest.approx(1e-3 + 500e-6)
    both = work(model, ranks=2, backward=True)
    assert model.rest_s(both, rates(model)) == pytest.approx(1e-3 + 700e-6)


def test_time_of_the_model(model):
    r = rates(model)
    few = work(model, ranks=2, link_bytes=20)  # 2 ms on links
    assert model.time_s([few], r, 0.5) == pytest.approx(1.5e-3 + 12.288e-3 + 0.5e-3)
    bound = work(model, ranks=2, link_bytes=200)  # 20 ms: longer than 12.288 + 5
    assert model.time_s([few, bound], r, 0.5) == pytest.approx(1.5e-3 + 20e-3)
    assert model.efficiency([few], r, model.time_s([few], r, 0.5)) == pytest.approx(0.5)
    slow = work(model, ranks=2, link_bytes=20, tiles=8)
    assert model.efficiency([few, slow], r, 0.03) == model.efficiency([slow], r, 0.03)


def plan(name, tokens, ep):
    arguments = ["--model", name, "--shared", 0, "--tokens", tokens, "--ep", ep, "--json"]
    return json.loads(subprocess.check_output([MOK, "plan", *map(str, arguments)], timeout=60))


# Measured on H200s at EP 1 and EP 2 by an earlier version, and what the model says.
@needs_mok
@pytest.mark.parametrize(
    ("name", "tokens", "direction", "ep1", "ep2", "error"),
    [
        ("qwen3-30b-a3b", 8192, "forward", 1.364, 1.334, 0.026),
        ("qwen3-30b-a3b", 8192, "backward", 3.142, 2.906, 0.002),
        ("deepseek-v3", 4096, "forward", 7.146, 5.879, 0.055),
        ("deepseek-v3", 4096, "backward", 23.53, 17.00, 0.042),
        ("mixtral-8x7b", 8192, "forward", 8.938, 9.788, -0.086),
        ("mixtral-8x7b", 8192, "backward", 20.53, 20.99, -0.040),
    ],
)
def test_the_model_against_two_gpus(model, name, tokens, direction, ep1, ep2, error):
    r = model.RATES["bf16"]
    one, two = (model.works_of_plan(plan(name, tokens, ep), direction) for ep in (1, 2))
    predicted = model.time_s(two, r, model.efficiency(one, r, ep1 * 1e-3)) * 1e3
    assert predicted / ep2 - 1 == pytest.approx(error, abs=2e-3)


@needs_mok
def test_work_is_read_off_the_plan(model):
    two = plan("qwen3-30b-a3b", 8192, 2)
    for direction in ("forward", "backward"):
        for rank, w in enumerate(model.works_of_plan(two, direction)):
            assert (w.hidden, w.intermediate, w.topk, w.experts) == (2048, 768, 8, 64)
            assert (w.tokens, w.ranks, w.backward) == (8192, 2, direction == "backward")
            assert w.tiles == two[direction]["ranks"][rank]["tiles"] and w.recomputed_tiles == 0
            there, back = (two[direction]["link_bytes"][i][1 - i] for i in (0, 1))
            assert w.link_bytes == max(there, back)


# Routing --------------------------------------------------------------------------------------


def test_ids_are_distinct_and_as_frequent_as_asked(load):
    draw = load("routing").topk_ids
    ids = draw(20000, 8, 3, "zipf:1")
    assert ids.shape == (20000, 3) and ids.dtype == np.int32 and ids.min() == 0 and ids.max() == 7
    assert all(len(set(row)) == 3 for row in ids[:500].tolist())
    assert np.array_equal(ids, draw(20000, 8, 3, "zipf:1"))
    one = np.sort(np.bincount(draw(20000, 8, 1, "zipf:1").ravel(), minlength=8))[::-1] / 20000
    weights = 1 / np.arange(1, 9)
    assert one == pytest.approx(weights / weights.sum(), abs=0.012)
    even = np.bincount(draw(20000, 8, 3, "uniform").ravel(), minlength=8) / 60000
    assert even == pytest.approx(np.full(8, 1 / 8), abs=0.006)


@pytest.mark.parametrize("text", ["zipf", "uniform:2", "one-expert", "zipf:x"])
def test_routings_that_cannot_be_drawn(load, text):
    with pytest.raises(ValueError):
        load("routing").name(text)


def test_the_yardstick_takes_rows_of_a_file(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "bench")
    products = importlib.import_module("products_only")
    np.save(tmp_path / "ids.npy", np.array([[0, 1], [2, 3], [3, 2], [3, -1]], np.int32))
    path = str(tmp_path / "ids.npy")
    assert products.rows_per_expert_of_file(path, 4, 1).tolist() == [1, 1, 2, 3]
    assert products.rows_per_expert_of_file(path, 4, 2).tolist() == [2, 3]
    asked = []
    monkeypatch.setattr(products, "measure", lambda *problem: asked.append(problem))
    monkeypatch.setattr(sys, "argv", ["products_only.py", "--backward", "-"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"a:64:2:{path}\nb:32:1\n"))
    products.main()
    assert asked == [("a", 64, 2, path, False, True), ("b", 32, 1, "", False, True)]


# Command --------------------------------------------------------------------------------------


def scaling(out, *arguments):
    # A program beside the working folder: its name alone must not be looked up in PATH.
    command = [sys.executable, SCALING, "--mok", MOK.name, "--out", out, *arguments]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60, cwd=MOK.parent
    )


def cell(table, direction, head, column):
    """Of the line of a direction's table that begins with `head`."""
    part = table.split(f"### {direction}")[1].split("###")[0]
    line = next(row for row in part.splitlines() if row.startswith(f"| {head} |"))
    return line.split(" | ")[column]


@needs_mok
def test_the_command_on_the_cpu(tmp_path, load):
    arguments = ["--device", "cpu", "--ep", 1, 2, 4, "--gpus", 2, "--tokens", 48, "--repeat", 1,
                 "--digest-tokens", 64]  # fmt: skip
    done = scaling(tmp_path, "--model", "128,64,16,2", "gpt-1", *arguments)
    assert done.returncode == 1, done.stderr  # gpt-1; the others went on
    records = json.loads((tmp_path / "records.json").read_text())
    cases = {(c["model"], c["routing"], c["ep"]): c for c in records["cases"]}
    assert len(cases) == 12 and len(records["digests"]) == 12
    for route in ("uniform", "zipf:1.2"):
        for ep in (1, 2, 4):
            case = cases["128,64,16,2", route, ep]
            assert case["tokens"] == 48 and case["errors"] == []
            assert case["forward"]["operations"] == 6 * 128 * 64 * 48 * 2
            assert ("measured_ms" in case["backward"]) == (ep <= 2)
            assert (case["forward"]["link_bytes"] > 0) == (ep > 1)
        same = [d["digest"] for d in records["digests"]
                if "digest" in d and d["routing"] == route]  # fmt: skip
        assert len(same) == 3 and same[0] == same[1] == same[2]
    table = (tmp_path / "table.md").read_text()
    assert "predicted" in cell(table, "Backward", "128,64,16,2 | bf16 | uniform | 4", 4)
    assert cell(table, "Bits", "128,64,16,2 | bf16 | zipf:1.2", 4).startswith("same")
    assert "gpt-1 bf16 uniform ep 2: mok plan: --model: 'gpt-1' is none of" in table
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again"
    replot = ["--replot", str(tmp_path / "records.json"), "--out", str(again)]
    assert load("command").main(replot) == 1 and (again / "table.md").read_text() == table


@needs_mok
def test_two_gpus(tmp_path, load, monkeypatch):
    fake = tmp_path / "mok"
    plan, others = f'exec {MOK} "$@"', f'exec {sys.executable} {FAKE} "$@"'
    fake.write_text(f"#!/bin/sh\ncase $1 in plan) {plan};; *) {others};; esac\n")
    fake.chmod(0o755)
    products = tmp_path / "products.py"
    products.write_text(FAKE_PRODUCTS)
    monkeypatch.setenv("MOK_FAKE_LOG", str(tmp_path / "log"))
    load("machine").PRODUCTS = products
    models = ["64,64,8,2", "192,64,8,2", "320,64,8,2"]
    out = tmp_path / "out"
    assert load("command").main([
        "--mok", str(fake), "--out", str(out), "--model", *models, "--ep", "1", "2", "4",
        "--routing", "uniform", "--tokens", "64", "--digest-tokens", "64", "--case-seconds", "3",
    ]) == 1  # fmt: skip
    log = (tmp_path / "log").read_text().splitlines()
    bench = [line for line in log if line.startswith("bench --hidden 64 ")]
    # EP 1 on each GPU, EP 2 on both, EP 4 not at all; bits everywhere.
    assert sorted(line.rpartition("--device cuda")[2] for line in bench) == [
        "",
        " --gpus 0",
        " --gpus 1",
    ]
    runs = [line.endswith("--virtual") for line in log if line.startswith("run --hidden 64 ")]
    assert runs == [False, False, True]

    cases = {(c["model"], c["ep"]): c
             for c in json.loads((out / "records.json").read_text())["cases"]}  # fmt: skip
    plain = cases["64,64,8,2", 1]["backward"]
    assert (plain["measured_ms"], plain["slowest_gpu_ms"], plain["products_ms"]) == (3.0, 4.5, 2.0)
    assert cases["192,64,8,2", 1]["errors"] == ["mok bench took more than 3 s"]
    assert cases["320,64,8,2", 2]["errors"] == ["mok bench: out_of_memory: weights"]
    assert all(cases[m, 4]["errors"] == ["products-only: no products at EP 4"] for m in models)
    assert cases["320,64,8,2", 1]["errors"] == []  # products were begun anew

    table = (out / "table.md").read_text()
    head = "64,64,8,2 | bf16 | uniform"
    assert cell(table, "Forward", f"{head} | 1", 4) == "1.000"
    assert cell(table, "Forward", f"{head} | 1", 7) == "2.00"  # ratio to the products
    assert "predicted" in cell(table, "Forward", f"{head} | 4", 4)
    assert cell(table, "Bits", head, 5) == "same, virtual ranks |"
    assert cell(table, "Bits", "320,64,8,2 | bf16 | uniform", 4) == "OTHER BITS: d_x"
    assert "goal" not in table


def test_goals_stand_beside_predictions(load):
    facts = {"operations": 618.5e9, "predicted_ms": 1.4, "error": 0.05, "error_ep": 2}
    case = {"model": "qwen3-30b-a3b", "precision": "bf16", "routing": "uniform", "ep": 8,
            "tokens": 8192, "forward": facts}  # fmt: skip
    said = load("report").goals([case, case | {"ep": 4}, case | {"routing": "zipf:1.2"}])
    assert said == [
        "qwen3-30b-a3b, forward, EP 8: 442 TFLOP/s a GPU predicted "
        "(464 if the error at EP 2 stays); goal 420, best published 238"
    ]
