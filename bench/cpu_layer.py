"""The layer on the CPU beside the same layer as a loop over experts in PyTorch, in one dtype.

    python bench/cpu_layer.py [--problem H,I,E,K,T ...] [--dtype bf16|fp32] [--repeat N]

Both get the same inputs and as many threads as there are cores, and take turns; one rank. A line a
problem: medians in ms of forward and of backward (all gradients), their ratios, and the largest
difference of y, relative to its norm.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import mok

PROBLEMS = ["2048,768,16,4,512", "512,256,16,4,1024"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def loop(x, ids, weights, gate, up, down):
    """y = sum over k of w_k * expert(x), an expert at a time."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    for e in range(gate.shape[0]):
        token, k = (ids == e).nonzero(as_tuple=True)
        rows = x[token]
        r = (F.silu(rows @ gate[e].T) * (rows @ up[e].T)) @ down[e].T
        y = y.index_add(0, token, r.float() * weights[token, k, None])
    return y.to(x.dtype)


def timed(function, inputs, d_y):
    """(y, ms of forward, ms of backward)"""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    begin = time.perf_counter()
    y = function(*leaves)
    middle = time.perf_counter()
    y.backward(d_y)
    end = time.perf_counter()
    return y.detach(), (middle - begin) * 1e3, (end - middle) * 1e3


def measure(problem, dtype, repeat):
    H, I, E, K, T = (int(n) for n in problem.split(","))
    g = torch.Generator().manual_seed(1)
    normal = lambda *s: torch.randn(s, generator=g).to(dtype)  # noqa: E731
    inputs = (
        normal(T, H),
        torch.rand(T, E, generator=g).argsort(1)[:, :K].contiguous(),
        torch.rand(T, K, generator=g),
        normal(E, I, H) * H**-0.5, normal(E, I, H) * H**-0.5, normal(E, H, I) * I**-0.5,
    )  # fmt: skip
    d_y = normal(T, H)
    times = {"layer": [], "loop": []}
    for n in range(repeat + 1):  # the first is a warm-up
        ours = timed(mok.moe, inputs, d_y)
        theirs = timed(loop, inputs, d_y)
        if n > 0 or repeat == 0:
            times["layer"].append(ours[1:])
            times["loop"].append(theirs[1:])
    error = ((ours[0].float() - theirs[0].float()).norm() / theirs[0].float().norm()).item()
    a, b = ([statistics.median(t) for t in zip(*times[w], strict=True)] for w in ("layer", "loop"))
    print(
        f"H {H}, I {I}, E {E}, K {K}, T {T}: layer {a[0]:.0f} / {a[1]:.0f} ms, "
        f"loop {b[0]:.0f} / {b[1]:.0f} ms, ratio {b[0] / a[0]:.1f} / {b[1] / a[1]:.1f}, "
        f"difference of y {error:.1e}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", action="append", metavar="H,I,E,K,T")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--repeat", type=int, default=3, help="0: one call each, no warm-up")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    print(
        f"PyTorch {torch.__version__}, {args.dtype}, {cores} cores, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    for problem in args.problem or PROBLEMS:
        measure(problem, DTYPES[args.dtype], args.repeat)


if __name__ == "__main__":
    main()
