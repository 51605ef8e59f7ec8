"""Reads what ptxas says (-Xptxas -v) and fails when a kernel spills registers to memory.

    check_spills.py LOG [--kernel REGEX] [--expect REGEX]... [--allow REGEX=BYTES]...
                    [--allow-none]

Prints a line for each function compiled: registers, stack frame, spill stores and loads in bytes,
and its name. --kernel names the functions that must not spill (default: all); that none matches is
an error too, unless --allow-none is given. Each --expect must match one of them, so that no kernel
slips through by a new name, or by being compiled elsewhere. --allow gives the functions that match
a stack frame of that many bytes, for spills whose cost was measured. Errors are, in any function,
also all messages C7500 to C7599: a setmaxnreg that ptxas ignored (C7508), products that it runs
one after the other (C7510 to C7520: wgmma serialised).
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROPERTIES = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SLOW = re.compile(r"setmaxnreg.*ignored|\(C75\d\d\)|wgmma.*serialized", re.IGNORECASE)


@dataclass
class Usage:
    """What one function takes; registers is None where ptxas does not say (device functions)."""

    name: str
    stack: int
    spill_stores: int
    spill_loads: int
    registers: int | None = None

    @property
    def spills(self) -> bool:
        return self.spill_stores > 0 or self.spill_loads > 0


def parse(log: str) -> list[Usage]:
    usages: list[Usage] = []
    name = None
    for line in log.splitlines():
        if match := _PROPERTIES.search(line):
            name = match[1]
        elif (match := _SPILLS.search(line)) and name is not None:
            usages.append(Usage(name, *map(int, match.groups())))
            name = None
        elif (match := _REGISTERS.search(line)) and usages and usages[-1].registers is None:
            usages[-1].registers = int(match[1])
    return usages


def problems(
    log: str,
    kernel: str = "",
    allow_none: bool = False,
    expected: Sequence[str] = (),
    allowed: Sequence[tuple[str, int]] = (),
) -> list[str]:
    checked = [usage for usage in parse(log) if re.search(kernel, usage.name)]
    found = [
        f"{u.name} spills: {u.spill_stores} bytes stored, {u.spill_loads} bytes loaded"
        for u in checked
        if u.spills
        and not any(re.search(name, u.name) and u.stack <= stack for name, stack in allowed)
    ]
    if not checked and not allow_none:
        found.append(f"no function matches '{kernel}': was the log written with -Xptxas -v?")
    found += [
        f"no function matches '{pattern}', which must be there"
        for pattern in expected
        if not any(re.search(pattern, usage.name) for usage in checked)
    ]
    found += dict.fromkeys(line.strip() for line in log.splitlines() if _SLOW.search(line))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--kernel", default="", metavar="REGEX")
    parser.add_argument("--expect", action="append", default=[], metavar="REGEX")
    parser.add_argument("--allow", action="append", default=[], metavar="REGEX=BYTES")
    parser.add_argument("--allow-none", action="store_true")
    options = parser.parse_args(arguments)
    log = options.log.read_text(errors="replace")
    for u in parse(log):
        print(
            f"{u.registers or '-':>4} registers {u.stack:6} stack "
            f"{u.spill_stores:6} stores {u.spill_loads:6} loads  {u.name}"
        )
    allowed = [(name, int(stack)) for name, _, stack in (a.rpartition("=") for a in options.allow)]
    found = problems(log, options.kernel, options.allow_none, options.expect, allowed)
    for problem in found:
        print(f"check_spills: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
