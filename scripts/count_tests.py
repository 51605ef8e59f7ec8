"""Adds up JUnit reports and prints 'N passed, N failed, N skipped'; exit code 1 if any failed."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def count(report: str) -> tuple[int, int, int]:
    """Passed, failed and skipped test cases of one report's text."""
    passed = failed = skipped = 0
    for case in ET.fromstring(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None or case.get("status") == "disabled":
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def main(paths: list[str]) -> int:
    totals = [0, 0, 0]
    for path in map(Path, paths):
        if path.exists():
            totals = [a + b for a, b in zip(totals, count(path.read_text()), strict=True)]
    print("{} passed, {} failed, {} skipped".format(*totals))
    return 1 if totals[1] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
