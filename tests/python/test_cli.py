"""The program `mok`: exit codes, one JSON object, digests that no split or knob changes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parents[2]
MOK = Path(os.environ.get("MOK_BIN", ROOT / "build" / "cpu" / "mok"))
SMALL = "--hidden 96 --intermediate 80 --experts 8 --topk 2".split()
SHARED = [*SMALL, "--shared", "48", "--shared-gate"]
OUTPUTS = ["y", "d_x", "d_topk_weights", "d_w_gate", "d_w_up", "d_w_down"]

pytestmark = pytest.mark.skipif(not MOK.exists(), reason=f"{MOK} is not built")


def mok(*arguments, timeout=240):
    command = [str(MOK), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def mok_json(*arguments, rc=0, **options):
    """What one run prints; json.loads refuses anything beside one object."""
    done = mok(*arguments, "--json", **options)
    assert done.returncode == rc, done.stderr
    return json.loads(done.stdout)


def run(*arguments, **options):
    return mok_json("run", "--device", "cpu", *arguments, **options)


def test_json_has_what_is_promised():
    result = run(*SHARED, "--tokens", 40, "--ep", 2, "--check", "--repeat", 3)
    assert result["device"] == "cpu" and result["ep"] == 2 and result["tokens"] == [40, 40]
    assert result["precision"] == "bf16" and result["shape"]["hidden"] == 96
    assert list(result["digest"]) == OUTPUTS
    assert all(len(bytes.fromhex(d)) == 8 for d in result["digest"].values())
    assert [set(d) for d in result["digest_shared"]] == [
        {"d_shared_gate", "d_shared_up", "d_shared_down", "d_shared_vector"}
    ] * 2
    assert result["check"]["pass"] is True
    assert set(OUTPUTS) < set(result["check"]["max_rel_err"])
    assert result["time_ms"]["forward"] > 0 and result["time_ms"]["backward"] > 0
    assert result["memory_bytes"] > 0
    assert result["repeat_same_bits"] is True


@pytest.mark.parametrize(("precision", "row"), [("mxfp8", 96 + 16), ("fp8", 96 + 16)])
def test_fp8_precisions(precision, row):
    problem = [*SHARED, "--tokens", "40,30", "--ep", 2, "--precision", precision]
    result = run(*problem, "--check", "--repeat", 2)
    assert result["precision"] == precision and result["repeat_same_bits"] is True
    check = result["check"]
    assert check["pass"] is True
    for output in OUTPUTS:
        assert check["whole_err"][output] < check["whole_tolerance"][output] < 2.6e-2
    assert result["time_ms"]["quantize_weights"] > 0
    plan = mok_json("plan", *problem, "--validate")
    assert plan["validate"]["pass"] is True
    assert plan["memory"]["symmetric"]["staged_x"] == 40 * row
    # Half the bytes of x, and all those of y: what bf16's plan says less 96 * 2 - row a token.
    plain = mok_json("plan", *problem, "--precision", "bf16")
    there, back = plan["forward"]["link_bytes"], plain["forward"]["link_bytes"]
    assert 0 < back[1][0] - there[1][0] <= 30 * (192 - row)
    bench = mok_json("bench", "--device", "cpu", *problem, "--routing", "uniform", "--repeat", 1)
    assert bench["results"][0]["time_ms"]["quantize_weights"] > 0


def test_forward_alone_has_no_gradients():
    result = run(*SMALL, "--tokens", 40, "--pass", "forward")
    assert list(result["digest"]) == ["y"] and list(result["time_ms"]) == ["forward"]


SPLITS = [
    ["--ep", 1, "--tokens", 512],
    ["--ep", 2, "--tokens", 256],
    ["--ep", 4, "--tokens", "200,100,150,62"],
]


@pytest.mark.parametrize("routing", ["uniform", "zipf:1.2", "one-expert", "none"])
def test_splits_give_the_same_digests(routing):
    results = [run(*SHARED, *split, "--routing", routing) for split in SPLITS]
    assert results[0]["digest"] == results[1]["digest"] == results[2]["digest"]
    assert results[0]["digest"] != run(*SHARED, *SPLITS[0], "--seed", 2)["digest"]


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64", "mxfp8", "fp8"])
def test_processes_give_the_bits_of_threads(precision):
    arguments = [*SHARED, "--ep", 4, "--tokens", "50,0,70,20", "--precision", precision]
    threads = run(*arguments, "--ranks", "threads")
    processes = run(*arguments, "--ranks", "processes")
    assert threads["digest"] == processes["digest"]
    assert threads["digest_shared"] == processes["digest_shared"]
    assert processes["ranks"] == "processes"


@pytest.mark.parametrize(
    "knobs",
    [
        ["--ring", 256, "--minibatch", 128],
        ["--ring", 256, "--minibatch", 128, "--saved-rows", 0],
        ["--comm-workers", 3, "--workers", 3],
    ],
)
def test_knobs_change_no_bit(knobs):
    arguments = [*SHARED, "--ep", 2, "--tokens", "300,77"]
    assert run(*arguments)["digest"] == run(*arguments, *knobs)["digest"]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_gradients_as_asked(ranks):
    problem = [*SHARED, "--ep", 2, "--tokens", "60,33", "--check", "--repeat", 2, "--ranks", ranks]
    plain, total, rounded, added = (
        run(*problem, *(["--grads", mode] if mode else []))
        for mode in ("", "sum", "bf16", "accumulate")
    )
    modes = [r["grads"] for r in (plain, total, rounded, added)]
    assert modes == ["sum", "sum", "bf16", "accumulate"]
    assert all(r["check"]["pass"] and r["repeat_same_bits"] for r in (plain, total, rounded, added))
    # Added to zeros, a sum is itself.
    for key in ("digest", "digest_shared"):
        assert plain[key] == total[key] == added[key]
    for name in OUTPUTS:
        assert (rounded["digest"][name] == plain["digest"][name]) == (not name.startswith("d_w_"))
    for shared, sums in zip(rounded["digest_shared"], plain["digest_shared"], strict=True):
        assert all(shared[name] != sums[name] for name in sums)


def test_gradients_that_are_not_bf16():
    problem = [*SHARED, "--tokens", 40, "--check"]
    for precision in ("fp32", "fp64"):
        total, added = (
            run(*problem, "--precision", precision, "--grads", mode)
            for mode in ("sum", "accumulate")
        )
        assert total["check"]["pass"] and added["check"]["pass"]
        assert total["digest"] == added["digest"]


def test_bench_has_gradients_as_its_yardstick():
    bench = ["bench", *SMALL, "--tokens", 30, "--device", "cpu", "--repeat", 1, "--warm-up", 0,
             "--routing", "uniform"]  # fmt: skip
    assert "grads" not in mok_json(*bench)
    assert mok_json(*bench, "--pass", "both")["grads"] == "bf16"
    assert mok_json(*bench, "--pass", "both", "--grads", "accumulate")["grads"] == "accumulate"
    assert mok_json(*bench, "--pass", "both", "--precision", "fp32")["grads"] == "sum"


def test_the_last_of_a_repeated_option_wins():
    once = run(*SMALL, "--tokens", 30, "--routing", "none", "--seed", 5)
    twice = run(
        *SMALL, "--tokens", "1,2", "--routing", "uniform", "--seed", 4, "--experts", 8,
        "--tokens", 30, "--routing", "none", "--seed", 5, "--json",
    )  # fmt: skip
    assert once["digest"] == twice["digest"] and twice["tokens"] == [30]


def test_routing_from_a_file(tmp_path):
    ids = np.random.default_rng(0).integers(-1, 8, size=(60, 2))
    for dtype in (np.int32, np.int64):
        np.save(tmp_path / f"{dtype.__name__}.npy", ids.astype(dtype))
    results = [
        run(*SMALL, *split, "--routing", f"file:{tmp_path}/{name}.npy", "--check")
        for name, split in [
            ("int32", ["--ep", 1, "--tokens", 60]),
            ("int64", ["--ep", 2, "--tokens", "11,49"]),
        ]
    ]
    assert results[0]["digest"] == results[1]["digest"]
    assert all(r["check"]["pass"] for r in results)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokens", "4", "--foo"], "--foo"),
        (["--tokens", "4", "extra"], "extra"),
        ([], "--tokens"),
        (["--tokens", "x"], "--tokens"),
        (["--tokens", "-3"], "--tokens"),
        (["--tokens", "1,,2"], "--tokens"),
        (["--tokens", "1,2,3", "--ep", "2"], "--tokens"),
        (["--tokens", "99999999999999999999"], "--tokens"),
        (["--tokens", "2000000000", "--ep", "2"], "--tokens"),
        (["--tokens", "4", "--ep", "3"], "--ep"),
        (["--tokens", "4", "--ep", "0"], "--ep"),
        (["--tokens", "4", "--ep", "9"], "--ep"),
        (["--tokens", "4", "--hidden", "0"], "--hidden"),
        (["--tokens", "4", "--hidden", "ten"], "--hidden"),
        (["--tokens", "4", "--intermediate", "-1"], "--intermediate"),
        (["--tokens", "4", "--experts", "5000"], "--experts"),
        (["--tokens", "4", "--topk", "9"], "--topk"),
        (["--tokens", "4", "--shared", "-1"], "--shared"),
        (["--tokens", "4", "--shared-gate"], "--shared-gate"),
        (["--tokens", "4", "--swiglu-limit", "0"], "--swiglu-limit"),
        (["--tokens", "4", "--swiglu-limit", "nan"], "--swiglu-limit"),
        (["--tokens", "4", "--model", "gpt-1"], "--model"),
        (["--tokens", "4", "--ranks", "fibres"], "--ranks"),
        (["--tokens", "4", "--device", "tpu"], "--device"),
        (["--tokens", "4", "--precision", "fp16"], "--precision"),
        (["--tokens", "4", "--pass", "backward"], "--pass"),
        (["--tokens", "4", "--routing", "zipf"], "--routing"),
        (["--tokens", "4", "--routing", "zipf:-1"], "--routing"),
        (["--tokens", "4", "--routing", "file:/nonexistent.npy"], "--routing"),
        (["--tokens", "4", "--routing", "file:/"], "--routing"),
        (["--tokens", "4", "--seed", "-1"], "--seed"),
        (["--tokens", "4", "--grads", "fp16"], "--grads"),
        (["--tokens", "4", "--grads", "bf16", "--precision", "fp32"], "--grads"),
        (["--tokens", "4", "--ring", "-5"], "--ring"),
        (["--tokens", "4", "--minibatch", "0"], "--minibatch"),
        (["--tokens", "4", "--saved-rows", "-2"], "--saved-rows"),
        (["--tokens", "4", "--comm-workers", "0"], "--comm-workers"),
        (["--tokens", "4", "--workers", "-1"], "--workers"),
        (["--tokens", "4", "--progress-deadline", "-1"], "--progress-deadline"),
        (["--tokens", "4", "--repeat", "0"], "--repeat"),
        (["--tokens", "4", "--device", "cuda", "--pass", "forward"], "--hidden"),
        (["--tokens", "4", "--device", "cuda", "--precision", "fp32"], "--precision"),
    ],
)
def test_bad_usage_names_the_argument(arguments, named):
    done = mok("run", *SMALL, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and named in done.stderr


@pytest.mark.parametrize("shape", ["wrong shape", "id too large", "no array", "floats"])
def test_bad_routing_files(tmp_path, shape):
    path = tmp_path / "ids.npy"
    if shape == "wrong shape":
        np.save(path, np.zeros((5, 2), np.int64))
    elif shape == "id too large":
        np.save(path, np.full((4, 2), 8))
    elif shape == "floats":
        np.save(path, np.zeros((4, 2)))
    else:
        path.write_bytes(b"something else")
    done = mok("run", *SMALL, "--tokens", 4, "--routing", f"file:{path}")
    assert done.returncode == 2 and "--routing" in done.stderr and done.stderr.count("\n") == 1


def test_a_missing_size_is_named():
    done = mok("run", *SMALL[:-2], "--tokens", 4)
    assert done.returncode == 2 and "--topk" in done.stderr


def test_unknown_and_missing_subcommands():
    assert mok("frobnicate").returncode == 2 and "frobnicate" in mok("frobnicate").stderr
    assert mok().returncode == 2
    assert mok("--help").returncode == 0 and mok("--version").stdout.startswith("mok ")


def test_run_time_failures_are_3():
    # 2^24 x 2^24 weights fit no machine.
    done = mok(
        "run", "--hidden", 1 << 24, "--intermediate", 1 << 24, "--experts", 1, "--topk", 1,
        "--tokens", 1, "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 3 and "memory" in done.stderr and done.stderr.count("\n") == 1


def test_cuda_without_a_gpu_is_3():
    if mok_json("info")["cuda"]["why_not"] == "":
        pytest.skip("this machine has a GPU")
    done = mok(
        "run", "--hidden", 64, "--intermediate", 64, "--experts", 2, "--topk", 1, "--tokens", 4,
        "--device", "cuda",
    )  # fmt: skip
    assert done.returncode == 3 and "--device cuda" in done.stderr


def test_plan_is_consistent_with_a_run():
    problem = [*SHARED, "--ep", 2, "--tokens", "300,200"]
    plan = mok_json("plan", *problem, "--validate")
    assert plan["validate"] == {"pass": True, "violations": []}
    assert plan["rows"] == 1000 and 0 < plan["padding_share"] < 1
    for direction in ("forward", "backward"):
        links = plan[direction]["link_bytes"]
        assert links[0][0] == links[1][1] == 0 and links[0][1] > 0 and links[1][0] > 0
        assert sum(r["rows"] for r in plan[direction]["ranks"]) == 1000
    # The formula that `mok plan` prints is what a run takes.
    assert plan["memory_bytes"] == run(*problem)["memory_bytes"]


@pytest.mark.parametrize("knobs", [[], ["--ring", 512, "--minibatch", 256], ["--saved-rows", 64]])
@pytest.mark.parametrize("tokens", [1, 700])
def test_plan_knows_the_memory(knobs, tokens):
    problem = [*SMALL, "--tokens", tokens, *knobs]
    assert mok_json("plan", *problem)["memory_bytes"] == run(*problem)["memory_bytes"]


def test_info_and_bench():
    info = mok_json("info")
    assert info["cpu"]["cores"] >= 1 and info["memory"]["dev_shm_bytes"] > 0
    assert "mok" in mok("info").stdout
    bench = mok_json(
        "bench", *SMALL, "--tokens", 64, "--ep", 2, "--device", "cpu", "--repeat", 2,
        "--routing", "uniform,one-expert",
    )  # fmt: skip
    assert [r["routing"] for r in bench["results"]] == ["uniform", "one-expert"]
    for result in bench["results"]:
        assert result["time_ms"]["forward"] > 0 and result["tflops"]["forward"] > 0
        assert result["peak_bytes"] > 0 and result["link_bytes"] > 0


def test_check_passes():
    done = mok("check")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) > 40 and all(line.startswith("ok ") for line in lines[:-1])


def test_a_preset_against_the_oracle():
    result = run("--model", "qwen3-30b-a3b", "--tokens", 64, "--ep", 2, "--check")
    assert result["check"]["pass"] is True and result["shape"]["model"] == "qwen3-30b-a3b"
