"""Trains the model of train_lm.py in several precisions of its experts, from the same seed.

    python examples/compare_precisions.py                   # bf16, mxfp8, fp8; minutes each

Draws the loss curves into one picture and prints by how much each precision's validation loss ends
above bf16's; beside it, how far another seed of bf16 ends from the first, which is what such a gap
is to be measured by.
"""

import argparse
import json
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "mxfp8", "fp8"])
    parser.add_argument("--out", type=Path, default=Path("precisions_out"), help="folder")
    return parser.parse_args(argv)


def train(options, precision, seed):
    """The numbers that train_lm.py writes."""
    out = options.out / f"{precision}-{seed}"
    command = [sys.executable, HERE / "train_lm.py", "--precision", precision, "--seed", seed,
               "--steps", options.steps, "--batch", options.batch, "--ep", options.ep,
               "--out", out]  # fmt: skip
    print(f"{precision}, seed {seed}", flush=True)
    subprocess.run([str(part) for part in command], check=True)
    return json.loads((out / "losses.json").read_text())


def smooth(losses, width=10):
    return [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width)
            for i in range(len(losses))]  # fmt: skip


def draw(path, runs):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, (name, numbers) in enumerate(runs.items()):
        training = smooth(numbers["training"])
        axes.plot(range(1, len(training) + 1), training, color=f"C{i}", alpha=0.7, label=name)
        axes.plot(*zip(*numbers["validation"], strict=True), "o", color=f"C{i}")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.set(title="Experts in several precisions (lines: training, mean of 10; dots: validation)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv=None):
    options = arguments(argv)
    runs = {name: train(options, name, options.seed) for name in options.precisions}
    first = options.precisions[0]
    other = f"{first}, another seed"
    runs[other] = train(options, first, options.seed + 1)
    draw(options.out / "precisions.png", runs)
    base = runs[first]["validation"][-1][1]
    print(f"\nvalidation loss after {options.steps} steps, nats per byte")
    for name, numbers in runs.items():
        final = numbers["validation"][-1][1]
        print(f"  {name:22} {final:.4f}  {final - base:+.4f}  ({(final / base - 1) * 100:+.2f} %)")
    print(f"picture: {options.out / 'precisions.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
