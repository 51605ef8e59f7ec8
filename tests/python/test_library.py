"""The built library: what it needs of PyTorch, and how it is found."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mok import _library

ROOT = Path(__file__).resolve().parents[2]


def undefined_symbols():
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    out = subprocess.run(
        [nm, "-D", "--undefined-only", _library.find_library()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [line.split()[-1] for line in out.splitlines()]  # name@version


def test_J1_only_the_stable_interface_of_pytorch_and_nothing_of_python():
    symbols = undefined_symbols()
    assert any(s.startswith("aoti_torch_") for s in symbols)
    for s in symbols:
        own = s.startswith(("torch_", "aoti_torch_", "_ITM_", "__gmon_start__", "__cxa_finalize"))
        system = "@" in s and s.split("@")[-1].startswith(("GLIBC", "CXXABI", "GCC"))
        assert own or system, f"a symbol of another library: {s}"


def test_J1_symbols_of_pytorch_2_10():
    """No function of LibTorch's C interface that came later than the version aimed at."""
    headers = Path(torch.__file__).parent / "include/torch/csrc"
    known = set()
    for header in (headers / "stable/c/shim.h", headers / "inductor/aoti_torch/c/shim.h"):
        text = header.read_text()
        later = re.search(r"#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0", text)
        known |= set(
            re.findall(r"\b(?:aoti_)?torch_\w+(?=\()", text[: later.start() if later else None])
        )
    assert len(known) > 50
    used = {s for s in undefined_symbols() if s.startswith(("torch_", "aoti_torch_"))}
    assert used and used <= known, used - known


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment},
    )  # fmt: skip


def test_J1_a_missing_library_is_a_clear_import_error(tmp_path):
    result = python("import mok", MOK_LIBRARY=str(tmp_path / "none.so"))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ImportError: mok: MOK_LIBRARY=")
    shutil.copytree(
        ROOT / "python/mok", tmp_path / "mok", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    result = python("import mok", PYTHONPATH=str(tmp_path), MOK_LIBRARY="")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: mok: libmok_torch.so was found neither in")
    assert "make build" in last


def test_J1_a_file_that_does_not_load_is_one_line(tmp_path):
    broken = tmp_path / "libmok_torch.so"
    broken.write_bytes(b"no library")
    result = python("import mok", MOK_LIBRARY=str(broken))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        f"ImportError: mok: {broken} does not load under"
    )


def test_B9_exit_without_close_and_with_an_exception():
    code = """
import mok, torch
layer = mok.MoELayer(8, 4, 2, 1)
y = layer(torch.randn(3, 8)).sum()
{end}
"""
    forked = """
import os, sys
if (child := os.fork()) == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0"""
    for end, rc in ((forked, 0), ("raise SystemExit(3)", 3)):
        assert python(code.format(end=end)).returncode == rc
