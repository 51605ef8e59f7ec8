"""The scripts that CI trusts: they must see what they are there to see."""

import importlib.util
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_spills = load("check_spills")
count_tests = load("count_tests")

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z7forwardv' for 'sm_90a'
ptxas info    : Function properties for _Z7forwardv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 528 bytes smem
"""
SPILLED = """\
ptxas info    : Compiling entry function '_Z8backwardv' for 'sm_90a'
ptxas info    : Function properties for _Z8backwardv
    48 bytes stack frame, 40 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size
"""
SERIALISED = (
    "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources in function '_Z7forwardv'"
)


def test_spills_are_read():
    first, second = check_spills.parse(CLEAN + SPILLED)
    assert (first.name, first.registers, first.stack, first.spills) == (
        "_Z7forwardv",
        168,
        0,
        False,
    )
    assert (second.name, second.registers, second.stack) == ("_Z8backwardv", 255, 48)
    assert (second.spill_stores, second.spill_loads, second.spills) == (40, 36, True)


@pytest.mark.parametrize(
    ("log", "kernel", "allow_none", "expected"),
    [
        (CLEAN, "", False, []),
        (CLEAN + SPILLED, "forward", False, []),
        (
            CLEAN + SPILLED,
            "",
            False,
            ["_Z8backwardv spills: 40 bytes stored, 36 bytes loaded"],
        ),
        (
            CLEAN,
            "backward",
            False,
            ["no function matches 'backward': was the log written with -Xptxas -v?"],
        ),
        ("", "", True, []),
        (
            CLEAN + "ptxas info : (C7508) Potential: setmaxnreg ignored to maintain minimum\n",
            "",
            False,
            ["ptxas info : (C7508) Potential: setmaxnreg ignored to maintain minimum"],
        ),
        (CLEAN + 2 * f"{SERIALISED}\n", "", False, [SERIALISED]),
        (
            CLEAN + "ptxas info : (C7509) Something else\n",
            "",
            False,
            ["ptxas info : (C7509) Something else"],
        ),
        (CLEAN + "ptxas info : (C7600) Something else\n", "", False, []),
    ],
)
def test_spills_fail(tmp_path, log, kernel, allow_none, expected):
    assert check_spills.problems(log, kernel, allow_none) == expected
    path = tmp_path / "log"
    path.write_text(log)
    arguments = [str(path), "--kernel", kernel] + ["--allow-none"] * allow_none
    assert check_spills.main(arguments) == (1 if expected else 0)


def test_expected_kernels_are_there(tmp_path, capsys):
    missing = "no function matches 'backward', which must be there"
    expected = ["forward", "backward"]
    assert check_spills.problems(CLEAN, expected=expected) == [missing]
    spills = check_spills.problems(CLEAN + SPILLED, expected=expected)
    assert spills == ["_Z8backwardv spills: 40 bytes stored, 36 bytes loaded"]
    path = tmp_path / "log"
    path.write_text(CLEAN)
    arguments = [str(path), "--expect", "forward", "--expect", "backward"]
    assert check_spills.main(arguments) == 1
    assert check_spills.main(arguments[:3]) == 0
    out, err = capsys.readouterr()
    assert "168 registers" in out and "_Z7forwardv" in out and missing in err


CTEST = """<testsuite tests="4">
<testcase name="a" status="run"/>
<testcase name="b" status="fail"><failure message=""/></testcase>
<testcase name="c" status="notrun"><skipped message="SKIP_RETURN_CODE=4"/></testcase>
<testcase name="d" status="disabled"/>
</testsuite>"""
PYTEST = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/><testcase name="c"><error/></testcase>
</testsuite></testsuites>"""


def test_an_allowed_stack_frame_has_a_limit():
    usage = next(u for u in check_spills.parse(SPILLED) if u.spills)
    assert check_spills.problems(SPILLED, allowed=[(usage.name, usage.stack)]) == []
    assert check_spills.problems(SPILLED, allowed=[("another", usage.stack)]) != []
    assert check_spills.problems(SPILLED, allowed=[(usage.name, usage.stack - 1)]) != []


def test_counts(tmp_path, capsys):
    assert count_tests.count(CTEST) == (1, 1, 2)
    assert count_tests.count(PYTEST) == (2, 1, 0)
    paths = []
    for name, text in {"ctest.xml": CTEST, "pytest.xml": PYTEST}.items():
        paths.append(str(tmp_path / name))
        Path(paths[-1]).write_text(text)
    assert count_tests.main([*paths, str(tmp_path / "none.xml")]) == 1
    assert capsys.readouterr().out == "3 passed, 2 failed, 2 skipped\n"
    assert count_tests.main([]) == 0
