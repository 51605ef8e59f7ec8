"""The training demo, a few steps of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
