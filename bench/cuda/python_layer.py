"""The layer called from Python: the GPU's time, and the host's, beside the program's (mok bench).

    python3 bench/cuda/python_layer.py [--mok build/cuda/mok] qwen3-30b-a3b:8192 deepseek-v3:4096
    python3 bench/cuda/python_layer.py --host 5 qwen3-30b-a3b:64    the host's time alone, 5 times

GPU: medians of forward and backward (bf16 gradients of everything), enqueued one after another,
taken before and after the program's; the middle of both counts. Calls are many, because a card that
was idle runs faster at first.
Host: medians of what a call of mok.moe and of backward takes until it returns, at few tokens, and
of an autograd.Function with as many tensors that does nothing, its gradients being there already,
or made anew without values: PyTorch's own part. What a call returns is freed after its time. The
GPU is waited for every tenth time, outside of what is timed, so the host never waits for room in
its queue.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import mok
from mok.models import preset


def tensors(name, tokens, sets):
    p = preset(name)
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=g, device="cuda") * scale).bfloat16().requires_grad_()

    weights = [
        normal(p.experts, p.intermediate, p.hidden, scale=p.hidden**-0.5),
        normal(p.experts, p.intermediate, p.hidden, scale=p.hidden**-0.5),
        normal(p.experts, p.hidden, p.intermediate, scale=p.intermediate**-0.5),
    ]
    if p.shared_intermediate:
        weights += [
            normal(p.shared_intermediate, p.hidden, scale=p.hidden**-0.5),
            normal(p.shared_intermediate, p.hidden, scale=p.hidden**-0.5),
            normal(p.hidden, p.shared_intermediate, scale=p.shared_intermediate**-0.5),
        ]
    inputs = []
    for _ in range(sets):
        ids = torch.rand(tokens, p.experts, generator=g, device="cuda").topk(p.topk).indices
        topk_weights = torch.rand(tokens, p.topk, generator=g, device="cuda").softmax(-1)
        d_y = normal(tokens, p.hidden).detach()
        inputs.append((normal(tokens, p.hidden), ids, topk_weights.requires_grad_(), d_y))
    return weights, inputs


REPEAT, WARM_UP = 200, 50


def gpu_ms(name, tokens):
    weights, inputs = tensors(name, tokens, sets=2)
    marks = []
    for i in range(REPEAT + WARM_UP):
        x, ids, topk_weights, d_y = inputs[i % 2]
        marks.append([torch.cuda.Event(enable_timing=True) for _ in range(3)])
        marks[-1][0].record()
        y = mok.moe(x, ids, topk_weights, *weights)
        marks[-1][1].record()
        grads = torch.autograd.grad(y, [x, topk_weights, *weights], d_y)
        marks[-1][2].record()
        del y, grads
    torch.cuda.synchronize()
    forward, backward = (
        statistics.median(m[i].elapsed_time(m[i + 1]) for m in marks[WARM_UP:]) for i in range(2)
    )
    return forward, backward


class Nothing(torch.autograd.Function):
    """Takes and saves what the layer does; grads(): its gradients."""

    @staticmethod
    def forward(ctx, y, grads, *arguments):
        ctx.save_for_backward(*arguments)
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, d_y):
        assert len(ctx.saved_tensors) > 0
        return (None, None, *ctx.grads())


def host_us(name, tokens=64, repeat=300):
    """Forward without gradients; forward and backward: the layer, nothing, new gradients."""
    weights, ((x, ids, topk_weights, d_y),) = tensors(name, tokens, sets=1)
    leaves = [x, topk_weights, *weights]
    ready = [torch.zeros_like(t) for t in leaves]
    ready.insert(1, None)  # of the ids
    made = lambda: [t if t is None else torch.empty_like(t) for t in ready]  # noqa: E731
    calls = (
        lambda: mok.moe(x, ids, topk_weights, *weights),
        lambda: Nothing.apply(d_y, lambda: ready, x, ids, topk_weights, *weights),
        lambda: Nothing.apply(d_y, made, x, ids, topk_weights, *weights),
    )
    times = [[] for _ in range(1 + 2 * len(calls))]
    for i in range(repeat):
        if i % 10 == 0:
            torch.cuda.synchronize()
        with torch.no_grad():
            begin = time.perf_counter()
            y = calls[0]()
            times[0].append(time.perf_counter() - begin)
        for j, call in enumerate(calls):
            begin = time.perf_counter()
            y = call()
            middle = time.perf_counter()
            grads = torch.autograd.grad(y, leaves, d_y)
            end = time.perf_counter()
            del y, grads
            times[1 + 2 * j].append(middle - begin)
            times[2 + 2 * j].append(end - middle)
    return [1e6 * statistics.median(t[20:]) for t in times]


def host_text(times) -> str:
    bare, kept, back, *nothing = times
    return (
        f"host {bare:.0f} us forward, {kept:.0f} with gradients, {back:.0f} backward"
        f"; a Function of nothing {nothing[0]:.0f} and {nothing[1]:.0f}"
        f", with new gradients {nothing[2]:.0f} and {nothing[3]:.0f}"
        f"; beyond nothing {kept - nothing[0]:.0f} and {back - nothing[1]:.0f}"
        f", beyond new gradients {kept - nothing[2]:.0f} and {back - nothing[3]:.0f}"
    )


def program_ms(program, name, tokens):
    command = [program, "bench", "--device", "cuda", "--model", name, "--tokens", str(tokens),
               "--routing", "uniform", "--pass", "both", "--repeat", str(REPEAT),
               "--warm-up", str(WARM_UP), "--json"]  # fmt: skip
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result = json.loads(out)
    result = result["results"][0] if "results" in result else result
    return result["time_ms"]["forward"], result["time_ms"]["backward"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("problems", nargs="+", metavar="MODEL:TOKENS")
    parser.add_argument("--mok", help="the program, for comparison")
    parser.add_argument("--host", type=int, metavar="N", help="the host's time alone, N times")
    options = parser.parse_args()
    for problem in options.problems:
        name, tokens = problem.split(":")
        group = mok.init(max_tokens=int(tokens))
        if options.host:
            for _ in range(options.host):
                print(f"{name}: {host_text(host_us(name))}", flush=True)
            group.close()
            torch.cuda.empty_cache()
            continue
        before = gpu_ms(name, int(tokens))
        theirs = program_ms(options.mok, name, int(tokens)) if options.mok else None
        after = gpu_ms(name, int(tokens))
        line = f"{name} T={tokens}: forward {before[0]:.3f} and {after[0]:.3f} ms"
        line += f", backward {before[1]:.3f} and {after[1]:.3f} ms"
        if theirs:
            line += f"; program {theirs[0]:.3f} and {theirs[1]:.3f} ms"
            line += f", Python {(sum(before) + sum(after)) / 2 / sum(theirs) - 1:+.1%}"
        print(f"{line}; {host_text(host_us(name))}", flush=True)
        group.close()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
