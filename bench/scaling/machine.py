"""Runs the program `mok` and the yardstick on this machine, with a time limit for each case."""

import json
import select
import subprocess
import sys
import time
from pathlib import Path

PRODUCTS = Path(__file__).resolve().parents[1] / "products_only.py"


class CaseFailed(Exception):
    """One case has no result; the others go on."""


class Limits:
    """Seconds for a case and for all of them (None: no limit)."""

    def __init__(self, case_s, total_s):
        self.case_s, self.end = case_s, None if total_s is None else time.monotonic() + total_s

    def seconds(self):
        if self.end is None:
            return self.case_s
        left = self.end - time.monotonic()
        if left <= 0:
            raise CaseFailed("not begun: the time for all cases was up")
        return min(self.case_s, left)


class Mok:
    def __init__(self, program, device, limits):
        self.program, self.limits = str(program.resolve()), limits
        self.info = self.json("info")
        usable = sum(not gpu["why_not"] for gpu in self.info["cuda"]["gpus"])
        self.device = device if device != "auto" else "cuda" if usable else "cpu"
        self.gpus = usable if self.device == "cuda" else 0

    def json(self, *arguments):
        return self.json_of_each([arguments])[0]

    def json_of_each(self, calls):
        """The objects that several calls print; the calls run at the same time."""
        limit = self.limits.seconds()
        end = time.monotonic() + limit
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs = []
        try:
            for call in calls:
                command = [self.program, *map(str, call), "--json"]
                runs.append(subprocess.Popen(command, **pipes))
            out = [run.communicate(timeout=end - time.monotonic()) for run in runs]
        except subprocess.TimeoutExpired:
            raise CaseFailed(f"mok {calls[0][0]} took more than {limit:.0f} s") from None
        finally:
            for run in runs:
                run.kill()
                run.wait()
        for run, (text, errors) in zip(runs, out, strict=True):
            if run.returncode != 0:
                raise CaseFailed(f"mok {calls[0][0]}: {why(run.returncode, text, errors)}")
        return [json.loads(text) for text, _ in out]


def why(returncode, text, errors):
    """mok bench says it in the line of the shape that failed, the others on stderr."""
    if text:
        return next(r["error"] for r in json.loads(text)["results"] if "error" in r)
    return (errors.strip().splitlines() or [f"exit code {returncode}"])[-1].removeprefix("mok: ")


class Products:
    """bench/products_only.py as one process that is asked problem after problem: products are
    timed in turns with the layer, and PyTorch is loaded once. After a failure it is begun anew."""

    def __init__(self, limits, log):
        self.limits, self.log = limits, log
        self.process = None

    def ms(self, problem):
        """(forward, backward)"""
        limit = self.limits.seconds()
        if self.process is None:
            with self.log.open("a") as log:
                self.process = subprocess.Popen(
                    [sys.executable, str(PRODUCTS), "--backward", "-"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                )  # fmt: skip
        try:
            self.process.stdin.write(problem + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has ended: no line will come
        # One line for one problem: nothing waits in the reader's buffer.
        if not select.select([self.process.stdout], [], [], limit)[0]:
            self.stop()
            raise CaseFailed(f"products-only took more than {limit:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            self.stop()
            raise CaseFailed(f"products-only: {last_line(self.log)}")
        forward, backward = line.rsplit("forward", 1)[1].split(", backward")
        return float(forward.removesuffix("ms")), float(backward.strip().removesuffix("ms"))

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def last_line(path):
    return (path.read_text().strip().splitlines() or ["ended"])[-1]
