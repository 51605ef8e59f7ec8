"""The layer's matrix products alone, by torch._grouped_mm: the first yardstick of bench results.

Same shapes, and rows per expert from a random routing like the layer's; the shared expert's
products are included where asked. Prints one line a shape, forward (2 products) and backward (4).

    python3 bench/products_only.py qwen3-30b-a3b:8192:1 deepseek-v3:4096:2 [--shared] [--backward]

With a file of ids ([tokens of all ranks, K], as `mok --routing file:` reads it) after a third
colon, the rows are those of the rank that has most. "-" reads problems from stdin, a line each.
"""

import argparse
import statistics
import sys

import numpy as np
import torch

SHAPES = {  # H, I, E, K, I_s
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 0),
    "deepseek-v3": (7168, 2048, 256, 8, 2048),
    "kimi-k2.5": (7168, 2048, 384, 8, 2048),
    "mixtral-8x7b": (4096, 14336, 8, 2, 0),
    "gpt-oss-120b": (2880, 2880, 128, 4, 0),
}


def rows_per_expert(tokens, experts, topk, ranks, seed):
    """Rows of rank 0's experts when every rank has `tokens` tokens: K distinct experts each."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens * ranks, experts, generator=g)
    ids = scores.topk(topk, dim=1).indices.flatten()
    return torch.bincount(ids, minlength=experts)[: experts // ranks]


def rows_per_expert_of_file(path, experts, ranks):
    """Rows of the experts of the rank that has most rows."""
    ids = torch.from_numpy(np.load(path)).flatten()
    rows = torch.bincount(ids[ids >= 0], minlength=experts).view(ranks, -1)
    return rows[rows.sum(1).argmax()]


def median_ms(run, iterations=20, warmup=3):
    times = []
    for i in range(iterations + warmup):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(i % 2)
        end.record()
        end.synchronize()
        if i >= warmup:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure(name, tokens, ranks, file, shared, backward):
    H, I, E, K, I_s = SHAPES[name]
    local = E // ranks
    randn = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    w_gate_up, w_down = randn(local, 2 * I, H), randn(local, H, I)
    sets = []
    for seed in range(2):  # rotated: no set stays in L2
        if file:
            rows = rows_per_expert_of_file(file, E, ranks)
        else:
            rows = rows_per_expert(tokens, E, K, ranks, seed)
        offs = rows.cumsum(0).to(device="cuda", dtype=torch.int32)
        n = int(rows.sum())
        sets.append((offs, randn(n, H), randn(n, I), randn(n, 2 * I), randn(n, H)))
    x_s, h_s = randn(tokens, H), randn(tokens, I_s or 1)
    s_gate_up, s_down = randn(2 * (I_s or 1), H), randn(H, I_s or 1)
    mm = torch._grouped_mm

    def forward(i):
        offs, x, h, _, _ = sets[i]
        mm(x, w_gate_up.transpose(1, 2), offs=offs)
        mm(h, w_down.transpose(1, 2), offs=offs)
        if shared and I_s:
            x_s @ s_gate_up.T
            h_s @ s_down.T

    def backward_(i):
        offs, x, h, d_gu, d_y = sets[i]
        mm(d_y, w_down, offs=offs)  # d_h
        mm(d_gu, w_gate_up, offs=offs)  # d_x
        mm(d_y.t(), h, offs=offs)  # d_w_down
        mm(d_gu.t(), x, offs=offs)  # d_w_gate, d_w_up

    line = f"products-only {name} T={tokens} EP={ranks}: forward {median_ms(forward):.4f} ms"
    if backward:
        line += f", backward {median_ms(backward_):.4f} ms"
    print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="+", help="MODEL:TOKENS:RANKS[:IDS.npy], or -")
    parser.add_argument("--shared", action="store_true", help="with the shared expert's products")
    parser.add_argument("--backward", action="store_true")
    args = parser.parse_args()
    for problem in sys.stdin if args.problems == ["-"] else args.problems:
        name, tokens, ranks, *file = problem.strip().split(":", 3)
        measure(name, int(tokens), int(ranks), file[0] if file else "", args.shared, args.backward)
        torch.cuda.empty_cache()  # other programs may need the memory before the next problem


if __name__ == "__main__":
    main()
