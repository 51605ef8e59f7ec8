"""The training demo, a few steps of it; what the other examples compute."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
