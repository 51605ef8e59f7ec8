"""Times, bits and NVLink traffic of the layer at EP 1, 2, 4, 8, beside its products alone.

    python3 bench/scaling --mok build/cuda/mok --out build/scaling
    python3 bench/scaling --replot build/scaling/records.json --out build/scaling

EP degrees up to the number of GPUs are measured; the others are predicted (model.py) from the least
one that is measured, and so are the measured ones, to see the model's error. Writes records.json
(after every case), table.md and scaling.png. A case that fails is named at the end, and the exit
code is 1; the others go on. Models: presets, or H,I,E,K.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import sys
import tempfile
from pathlib import Path

import model
import numpy as np
import report
import routing
from machine import CaseFailed, Limits, Mok, Products

ROOT = Path(__file__).resolve().parents[2]
MODELS = ["qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "mixtral-8x7b"]
DIRECTIONS = ("forward", "backward")
draw_ids = functools.cache(routing.topk_ids)


def shape_arguments(name):
    sizes = name.split(",")
    options = ("--hidden", "--intermediate", "--experts", "--topk")
    named = zip(options, sizes, strict=True) if len(sizes) == 4 else [("--model", name)]
    # Without the shared expert: the yardstick is the routed experts' products.
    return [*(word for pair in named for word in pair), "--shared", "0"]


class Bench:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.limits = Limits(args.case_seconds, args.total_seconds)
        self.mok = Mok(args.mok, args.device, self.limits)
        self.on_gpus = self.mok.device == "cuda"
        have = self.mok.gpus if self.on_gpus else max(args.ep)  # the CPU's ranks are threads
        self.measured_ep = have if args.gpus is None else min(have, args.gpus)
        self.products = Products(self.limits, args.out / "products.log")
        self.records = {
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "mok": self.mok.info,
            "device": self.mok.device,
            "digest_tokens": args.digest_tokens,
            "cases": [],
            "digests": [],
        }

    def run(self):
        of_all = [(m, p, r) for p in self.args.precision for m in self.args.model
                  for r in self.args.routing]  # fmt: skip
        for which in of_all:
            for ep in self.args.ep:
                self.note("cases", self.case(*which, ep))
        self.products.stop()  # its GPU memory is wanted
        for which in of_all if self.args.digest_tokens else []:
            for ep in self.args.ep:
                self.note("digests", self.digest(*which, ep))
        return self.records

    def note(self, kind, record):
        self.records[kind].append(record)
        report.write_records(self.records, self.args.out)
        print(report.progress(record), flush=True)

    def case(self, name, precision, route, ep):
        case = {"model": name, "precision": precision, "routing": route, "ep": ep, "errors": []}
        steps = [self.plan]
        if ep <= self.measured_ep:
            steps.append(self.time_layer)
        if self.on_gpus:
            steps.append(self.time_products)
        for step in steps:
            try:
                step(case)
            except CaseFailed as e:
                case["errors"].append(str(e))
                if step == self.plan:
                    break  # without a plan nothing of the case is known
        return case

    def arguments(self, case):
        return [
            *shape_arguments(case["model"]),
            *("--precision", case["precision"], "--ep", case["ep"], "--tokens", case["tokens"]),
            *("--routing", f"file:{self.ids_file(case['ep'])}"),
        ]

    def ids_file(self, ep):
        return self.folder / f"ids-{ep}.npy"

    def plan(self, case):
        about = self.mok.json("plan", *shape_arguments(case["model"]), "--tokens", 1)["shape"]
        # What these models' figures are stated for.
        case["tokens"] = self.args.tokens or (4096 if about["hidden"] > 7000 else 8192)
        ids = draw_ids(
            case["tokens"] * max(self.args.ep), about["experts"], about["topk"], case["routing"]
        )
        # The same global tokens at every EP degree, as far as they go.
        np.save(self.ids_file(case["ep"]), ids[: case["tokens"] * case["ep"]])
        plan = self.mok.json("plan", *self.arguments(case))
        products = 6 * about["hidden"] * about["intermediate"] * plan["rows"] / case["ep"]
        for direction, factor in zip(DIRECTIONS, (1, 2), strict=True):
            works = model.works_of_plan(plan, direction)
            case[direction] = {
                "operations": factor * products,  # of a GPU, real rows
                "link_bytes": max(w.link_bytes for w in works),
                "works": [dataclasses.asdict(w) for w in works],
            }

    def time_layer(self, case):
        arguments = ["bench", *self.arguments(case), "--pass", "both", "--device", self.mok.device]
        if self.args.repeat:
            arguments += ["--repeat", self.args.repeat, "--warm-up", 1]
        calls = [arguments]
        if self.on_gpus and case["ep"] == 1:  # on every GPU, at the same time
            calls = [[*arguments, "--gpus", gpu] for gpu in range(self.measured_ep)]
        times = [run["results"][0]["time_ms"] for run in self.mok.json_of_each(calls)]
        for direction in DIRECTIONS:
            case[direction]["measured_ms"] = times[0][direction]
            # EP R lasts as long as the slowest of its GPUs: the model begins with that one.
            case[direction]["slowest_gpu_ms"] = max(t[direction] for t in times)

    def time_products(self, case):
        problem = f"{case['model']}:{case['tokens']}:{case['ep']}:{self.ids_file(case['ep'])}"
        for direction, ms in zip(DIRECTIONS, self.products.ms(problem), strict=True):
            case[direction]["products_ms"] = ms

    def digest(self, name, precision, route, ep):
        record = {"model": name, "precision": precision, "routing": route, "ep": ep}
        record["virtual"] = self.on_gpus and ep > self.measured_ep
        arguments = ["run", *shape_arguments(name), "--precision", precision, "--routing", route,
                     "--ep", ep, "--tokens", self.args.digest_tokens // ep,
                     "--device", self.mok.device, "--grads", "bf16"]  # fmt: skip
        if record["virtual"]:
            arguments.append("--virtual")
        try:
            record["digest"] = self.mok.json(*arguments)["digest"]
        except CaseFailed as e:
            record["error"] = str(e)
        return record


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="bench/scaling", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mok", type=Path, default=ROOT / "build" / "cuda" / "mok")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "scaling")
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--ep", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--routing", nargs="+", type=routing.name, default=["uniform", "zipf:1.2"])
    parser.add_argument("--precision", nargs="+", choices=list(model.RATES), default=["bf16"])
    parser.add_argument("--tokens", type=int, help="of each rank (default 8192; H > 7000: 4096)")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto")
    parser.add_argument("--gpus", type=int, help="measure up to this EP degree (default: all GPUs)")
    parser.add_argument("--repeat", type=int, help="timed calls (default: as mok bench)")
    parser.add_argument(
        "--digest-tokens", type=int, default=512, help="of all ranks; 0: no digests"
    )
    parser.add_argument("--case-seconds", type=float, default=60, help="limit of each case")
    parser.add_argument("--total-seconds", type=float, help="no case begins later")
    parser.add_argument("--replot", type=Path, metavar="RECORDS", help="runs nothing")
    args = parser.parse_args(argv)
    if args.digest_tokens % max(args.ep):
        parser.error(f"--digest-tokens: {max(args.ep)} ranks do not divide {args.digest_tokens}")
    if not (args.replot or args.mok.is_file()):
        parser.error(f"--mok: there is no {args.mok}")
    return args


def main(argv=None):
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.replot:
        records = json.loads(args.replot.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            try:
                records = Bench(args, Path(folder)).run()
            except CaseFailed as e:  # mok itself does not run
                print(f"bench/scaling: {e}", file=sys.stderr)
                return 2
    return report.write(records, args.out)
