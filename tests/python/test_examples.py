"""The training demo, a few steps of it; what the other examples compute."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def demo(*arguments, timeout=200):
    return subprocess.run(
        [sys.executable, ROOT / "examples/train_lm.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )


def test_F8_train_lm_over_two_ranks(tmp_path):
    result = demo("--steps", 12, "--batch", 4, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any("tokens/s  load" in line for line in lines)
    final = next(line for line in lines if line.startswith("validation loss"))
    loss, frequencies = float(final.split()[2]), float(final.split()[-1])
    assert 1.0 < loss < 5.6 and 2.5 < frequencies < 4.5
    same = "at EP=1 instead of EP=2: every bit of outputs and gradients is the same"
    assert any(line.endswith(same) for line in lines)
    for name in ("loss.png", "expert_load.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(("--device", "gpu"), "--device"), (("--ep", 3), "--ep"), (("--batch", 3), "--batch")],
)
def test_bad_options(arguments, name):
    result = demo(*arguments)
    assert result.returncode == 2 and name in result.stderr.splitlines()[-1]


def test_gaps_of_precisions_are_taken_seed_by_seed():
    compare = load_example("compare_precisions")

    def run(loss):
        return {"training": [9.0, loss + 1], "validation": [(1, 9.0), (2, loss)]}

    gaps = compare.final_gaps({"bf16": [run(2.0), run(3.0)], "fp8": [run(2.1), run(3.3)]})
    assert gaps["bf16"] == (2.5, 0.0, 0.0)
    assert gaps["fp8"] == pytest.approx((2.7, 0.2, 0.1))
    _, _, error = compare.final_gaps({"bf16": [run(2.0)]})["bf16"]
    assert math.isnan(error)  # one seed does not tell


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_gradients_are_summed_in_the_same_order_on_every_rank(dtypes, monkeypatch):
    train = load_example("train_lm_gpu")
    sent = []

    def all_reduce(flat):
        sent.append(flat.dtype)
        flat *= 2

    monkeypatch.setattr(train.dist, "all_reduce", all_reduce)
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=getattr(torch, d))) for d in dtypes * 2]
    for i, p in enumerate(parameters):
        p.grad = torch.full_like(p, i + 1)
    train.average(parameters, 2)
    assert sent == [getattr(torch, d) for d in dtypes]  # of a set: whatever its hashes say
    assert [p.grad.tolist() for p in parameters] == [[2.0 * (i + 1)] * 3 for i in range(4)]


def test_a_loss_that_is_not_finite_ends_the_training(monkeypatch):
    train = load_example("train_lm_gpu")

    class Model(torch.nn.Module):
        def __init__(self, *_):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.passes = 0

        def expert_parameters(self):
            return []

        def forward(self, tokens):
            self.passes += 1
            return self.weight * (1.0 if self.passes < 2 else torch.nan), 0.0

    monkeypatch.setattr(train, "Model", Model)
    for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    options = train.arguments(["--context", "4", "--batch", "1", "--passes", "1", "--steps", "3"])
    text = torch.arange(64, dtype=torch.uint8)
    with pytest.raises(SystemExit, match="plain: the loss of step 2 is nan"):
        train.train("plain", options, text, torch.device("cpu"), 1, 0)
