"""Trains the model of train_lm.py in several precisions of its experts, from the same seeds.

    python examples/compare_precisions.py                   # 3 precisions x 3 seeds; minutes each

Draws the loss curves (means over the seeds) into one picture and prints by how much the loss in
validation ends above that of the first precision with the same seed: the mean and its standard
error over the seeds. A run whose numbers are in the folder already is not trained again.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--batch", type=int, default=24, help="sequences of a step (default 24)")
    parser.add_argument("--ep", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "mxfp8", "fp8"])
    parser.add_argument("--out", type=Path, default=Path("precisions_out"), help="folder")
    return parser.parse_args(argv)


def train(options, precision, seed):
    """The numbers that train_lm.py writes."""
    out = options.out / f"{precision}-{seed}-{options.steps}"
    if (out / "losses.json").exists():
        return json.loads((out / "losses.json").read_text())
    command = [sys.executable, HERE / "train_lm.py", "--precision", precision, "--seed", seed,
               "--steps", options.steps, "--batch", options.batch, "--ep", options.ep,
               "--out", out]  # fmt: skip
    print(f"{precision}, seed {seed}", flush=True)
    subprocess.run([str(part) for part in command], check=True)
    return json.loads((out / "losses.json").read_text())


def smooth(losses, width=10):
    return [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width)
            for i in range(len(losses))]  # fmt: skip


def mean_curve(runs, key):
    """[(step, loss)], the mean of the runs; key: training or validation."""
    if key == "validation":
        return [(points[0][0], statistics.fmean(loss for _, loss in points))
                for points in zip(*(run[key] for run in runs), strict=True)]  # fmt: skip
    means = [statistics.fmean(losses) for losses in zip(*(run[key] for run in runs), strict=True)]
    return list(enumerate(smooth(means), start=1))


def draw(path, runs):
    """runs: {precision: [numbers of each seed]}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, (precision, numbers) in enumerate(runs.items()):
        training = mean_curve(numbers, "training")
        axes.plot(*zip(*training, strict=True), color=f"C{i}", alpha=0.7, label=precision)
        validation = mean_curve(numbers, "validation")
        axes.plot(*zip(*validation, strict=True), "o", color=f"C{i}")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.set(title="Experts in several precisions, means over seeds\n"
                   "(lines: training, mean of 10 steps; dots: validation)")  # fmt: skip
    axes.legend()
    figure.savefig(path, dpi=120)


def final_gaps(runs):
    """{precision: (mean loss, mean gap to the first precision, its standard error)}.

    Gaps are taken seed by seed. NaN: too few seeds for an error.
    """
    first = next(iter(runs.values()))
    result = {}
    for precision, numbers in runs.items():
        final = [run["validation"][-1][1] for run in numbers]
        gaps = [run["validation"][-1][1] - base["validation"][-1][1]
                for run, base in zip(numbers, first, strict=True)]  # fmt: skip
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        result[precision] = (statistics.fmean(final), statistics.fmean(gaps), error)
    return result


def main(argv=None):
    options = arguments(argv)
    runs = {name: [] for name in options.precisions}
    for seed in options.seeds:
        for precision in options.precisions:
            runs[precision].append(train(options, precision, seed))
    draw(options.out / "precisions.png", runs)
    seeds = ", ".join(map(str, options.seeds))
    print(f"\nvalidation loss after {options.steps} steps, nats per byte, mean of seeds {seeds}")
    for precision, (loss, gap, error) in final_gaps(runs).items():
        print(f"  {precision:6} {loss:.4f}  {gap:+.4f} +- {error:.4f}  ({gap / loss * 100:+.2f} %)")
    print(f"picture: {options.out / 'precisions.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
