"""Trains a small byte-level language model with mixture-of-experts layers over two ranks.

    python examples/train_lm.py                    # the text: the Python standard library's sources
    torchrun --nproc-per-node 2 examples/train_lm.py

Shows loss, speed and the load of every expert while it runs. At the end it prints the validation
loss beside that of a model that only knows how often each byte occurs, writes two pictures, and
says whether the first steps' MoE layers, replayed on one rank with both ranks' tokens, give the
same bits.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 3, 128
EXPERTS, TOPK, INNER = 8, 2, 128
REPLAYED_STEPS = 3


def arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--ep", type=int, default=2, help="ranks that share the experts (default 2)"
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument(
        "--batch", type=int, default=24, help="sequences of a step, all ranks (default 24)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder of the pictures")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu",
        help="cuda: a larger model beside a plain one; for its options: --device cuda --help",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=["bf16", "mxfp8", "fp8", "fp32"], default="bf16",
        help="of the experts",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if not 1 <= options.ep <= 8 or EXPERTS % options.ep:
        parser.error(f"--ep: {options.ep} does not divide the {EXPERTS} experts")
    if options.steps < 1 or options.batch % options.ep:
        parser.error("--steps, --batch: at least 1, and a multiple of the ranks")
    return options


# ---- text ------------------------------------------------------------------------------------


def read_text(limit=12 << 20):
    """(training bytes, validation bytes) of the standard library; whole files on either side."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        p for p in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests"} & set(p.relative_to(root).parts)
    )  # fmt: skip
    random.Random(0).shuffle(files)
    parts, size = [], 0
    for path in files:
        if size >= limit:
            break
        try:
            parts.append(path.read_bytes())
        except OSError:
            continue
        size += len(parts[-1])
    held_out = max(1, len(parts) // 10)
    if size < 1 << 20:
        raise SystemExit(f"{root} holds too little text: {size} bytes of Python sources")
    return b"".join(parts[held_out:]), b"".join(parts[:held_out])


def windows(data, count, generator):
    """int64 [count, CONTEXT + 1] at random places."""
    import torch

    starts = torch.randint(len(data) - CONTEXT - 1, (count,), generator=generator)
    return data[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def frequency_model_loss(train, targets):
    """Cross-entropy of `targets` under the training text's byte frequencies, nats per byte."""
    import torch

    counts = torch.bincount(train.long(), minlength=256).double() + 1
    return -(counts / counts.sum()).log()[targets].mean().item()


# ---- model -----------------------------------------------------------------------------------


def build_model(precision):
    import mok
    import torch
    import torch.nn.functional as F
    from torch import nn

    compute = torch.float32 if precision == "fp32" else torch.bfloat16

    class Experts(nn.Module):
        """Router and experts. `record` (a list or None) keeps what a replay needs."""

        def __init__(self):
            super().__init__()
            self.layer = mok.MoELayer(
                WIDTH, INNER, EXPERTS, TOPK, compute_dtype=compute,
                precision=None if precision == "fp32" else precision,
            )  # fmt: skip
            self.record = None

        def forward(self, x):
            flat = x.flatten(0, 1)
            logits = self.layer.router_logits(flat)
            ids, weights, scores = mok.route(logits, TOPK, self.layer.router)
            rows = flat.to(compute)
            y = self.layer(rows, topk_ids=ids, topk_weights=weights)
            if self.record is not None and torch.is_grad_enabled():
                for t in (rows, weights, y):
                    t.retain_grad()
                self.record.append((rows, ids, weights, y))
            return y.to(x.dtype).view(x.shape), scores, mok.expert_counts(ids, EXPERTS)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            self.experts = Experts()

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = (
                t.view(batch, length, HEADS, -1).transpose(1, 2)
                for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
            )
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
            y, scores, counts = self.experts(self.norms[1](x))
            return x + y, scores, counts

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(256, WIDTH)
            self.position = nn.Embedding(CONTEXT, WIDTH)
            for table in (self.embedding, self.position):
                nn.init.normal_(table.weight, std=0.05)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 256, bias=False)

        def forward(self, tokens):
            """tokens [B, CONTEXT + 1] -> (loss, scores of each layer, counts [LAYERS, E])."""
            x = self.embedding(tokens[:, :-1]) + self.position.weight
            scores, counts = [], []
            for block in self.blocks:
                x, s, c = block(x)
                scores.append(s)
                counts.append(c)
            logits = self.head(self.norm(x))
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            return loss, scores, torch.stack(counts)

    return Model()


class Gradients:
    """Makes the ranks' gradients those of the mean loss over all ranks, and clips their norm."""

    def __init__(self, model, ranks):
        self.ranks = ranks
        self.local = [p for b in model.blocks for p in b.experts.layer.expert_parameters()]
        mine = {id(p) for p in self.local}
        self.shared = [p for p in model.parameters() if id(p) not in mine]

    def combine(self, limit=1.0):
        import torch
        import torch.distributed as dist

        # Replicated parameters: the mean of the ranks. Experts: their gradient is the sum over all
        # ranks' tokens already.
        flat = torch.cat([p.grad.flatten() for p in self.shared])
        dist.all_reduce(flat)
        flat /= self.ranks
        for p, part in zip(self.shared, flat.split([p.numel() for p in self.shared]), strict=True):
            p.grad.copy_(part.view_as(p))
        for p in self.local:
            p.grad /= self.ranks
        squares = torch.stack([p.grad.square().sum() for p in self.local]).sum()
        dist.all_reduce(squares)
        norm = (squares + flat.square().sum()).sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for p in (*self.shared, *self.local):
            p.grad *= scale
        return norm.item()


# ---- replay ----------------------------------------------------------------------------------


@dataclass
class Replay:
    """What one MoE layer got and gave in one step, on one rank."""

    tensors: dict  # inputs: x, ids, weights, d_y, w_*; outputs: y, d_x, d_topk_weights, d_w_*
    precision: str | None

    @staticmethod
    def of(experts):
        import torch

        ((x, ids, weights, y),) = experts.record
        layer = experts.layer
        tensors = {"x": x.detach(), "ids": ids, "weights": weights.detach(), "d_y": y.grad,
                   "y": y.detach(), "d_x": x.grad, "d_topk_weights": weights.grad}  # fmt: skip
        for name in ("w_gate", "w_up", "w_down"):
            w = getattr(layer, name)
            tensors[name] = w.detach().to(x.dtype)
            tensors[f"d_{name}"] = w.grad.to(x.dtype)  # as delivered: the parameter's is a copy
        return Replay(
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()},
            layer.precision,
        )


def replay(parts, group):
    """Names of the tensors whose bits differ when one rank does what `parts` (a rank each) did."""
    import mok
    import torch

    whole = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
    x, weights, *experts = (
        whole[name].requires_grad_() for name in ("x", "weights", "w_gate", "w_up", "w_down")
    )
    y = mok.moe(
        x, whole["ids"], weights, *experts, precision=parts[0].precision, group=group
    )  # fmt: skip
    y.backward(whole["d_y"])
    mine = {"y": y.detach(), "d_x": x.grad, "d_topk_weights": weights.grad}
    mine |= {f"d_w_{n}": w.grad for n, w in zip(("gate", "up", "down"), experts, strict=True)}
    bits = lambda t: t.contiguous().view(torch.uint8)  # noqa: E731
    return [name for name, t in mine.items() if not torch.equal(bits(t), bits(whole[name]))]


# ---- what is shown ---------------------------------------------------------------------------


class Display:
    """Progress, loss, speed and a bar for each expert; plain lines where there is no terminal."""

    def __init__(self, steps):
        from rich.console import Console
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.console = Console()
        self.steps = steps
        self.live = None
        if self.console.is_terminal:
            self.progress = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(),
                TextColumn("{task.description}"), TimeRemainingColumn(), console=self.console,
            )  # fmt: skip
            self.task = self.progress.add_task("", total=steps)
            self.live = Live(self.progress, console=self.console, refresh_per_second=8)

    def __enter__(self):
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_):
        if self.live:
            self.live.stop()

    def show(self, step, loss, speed, counts):
        """counts: [LAYERS][E], slots of the step."""
        text = f"loss {loss:.3f}  {speed:,.0f} tokens/s"
        if self.live:
            from rich.console import Group

            self.progress.update(self.task, completed=step, description=text)
            self.live.update(Group(self.progress, *self.load_lines(counts)))
        elif step == 1 or step % 20 == 0 or step == self.steps:
            loads = "  ".join(self.load_line(row) for row in counts)
            print(f"step {step:4d}/{self.steps}  {text}  load {loads}", flush=True)

    @staticmethod
    def load_line(row):
        """A character per expert: its share of the slots, full height = three times the mean."""
        mean = sum(row) / len(row)
        return "".join(" ▁▂▃▄▅▆▇█"[min(8, round(8 * c / (3 * mean)))] for c in row)

    def load_lines(self, counts):
        lines = ["load of each expert (share of the slots, %)"]
        for i, row in enumerate(counts):
            shares = " ".join(f"{100 * c / sum(row):5.1f}" for c in row)
            lines.append(f"  layer {i}  {self.load_line(row)}  {shares}")
        return lines


def draw(out, losses, validation, frequency_loss, loads):
    """loss.png and expert_load.png; the numbers in losses.json."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    numbers = {"training": losses, "validation": validation, "frequencies": frequency_loss}
    (out / "losses.json").write_text(json.dumps(numbers))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.6, label="training")
    axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", label="validation")
    axes.axhline(frequency_loss, color="gray", linestyle="--", label="byte frequencies alone")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Loss")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120)

    loads = np.asarray(loads, dtype=float)  # [steps, LAYERS, E]
    share = loads / loads.sum(axis=2, keepdims=True)
    figure, grid = plt.subplots(
        LAYERS, 1, figsize=(7, 1 + 1.3 * LAYERS), sharex=True, layout="constrained"
    )
    for i, axes in enumerate(np.atleast_1d(grid)):
        image = axes.imshow(share[:, i].T, aspect="auto", vmin=0, vmax=3 / EXPERTS, cmap="viridis",
                            extent=(1, len(losses) + 1, EXPERTS - 0.5, -0.5),
                            interpolation="nearest")  # fmt: skip
        axes.set(ylabel=f"layer {i}\nexpert")
    axes.set(xlabel="step")
    figure.colorbar(image, ax=grid, label="share of the slots")
    figure.suptitle("Load of each expert")
    figure.savefig(out / "expert_load.png", dpi=120)


# ---- a rank ----------------------------------------------------------------------------------


def learning_rate(step, steps, peak=3e-3):
    import math

    warm = max(1, min(40, steps // 10))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (
        0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
    )


def train(options):
    """What each rank does, torch.distributed being initialised. Returns the exit code."""
    import mok
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    begin = time.perf_counter()
    sequences = options.batch // ranks
    mok.init(max_tokens=sequences * CONTEXT)
    torch.manual_seed(options.seed)  # the same on all ranks: replicated parameters are equal
    model = build_model(options.precision)
    gradients = Gradients(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
    train_text, valid_text = (
        torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in read_text()
    )
    # Every rank draws all ranks' windows and takes its share: the data are those of any EP degree.
    generator = torch.Generator().manual_seed(options.seed + 1)
    valid = windows(valid_text, 128, torch.Generator().manual_seed(2))
    frequency_loss = frequency_model_loss(train_text, valid[:, 1:])
    own = slice(rank * sequences, (rank + 1) * sequences)

    def validate():
        with torch.no_grad():
            parts = valid[rank::ranks].split(sequences)
            total = sum(model(part)[0] * len(part) for part in parts)
        dist.all_reduce(total)
        return total.item() / len(valid)

    if rank == 0:
        counts = [sum(p.numel() for p in each) for each in (gradients.shared, gradients.local)]
        parameters = counts[0] + ranks * counts[1]
        megabytes = (len(train_text) + len(valid_text)) / 1e6
        print(f"{parameters / 1e6:.1f} M parameters; {LAYERS} layers of {EXPERTS} experts, "
              f"top {TOPK}; {ranks} rank(s); {megabytes:.1f} MB of text", flush=True)  # fmt: skip

    losses, loads, validation, recorded = [], [], [], []
    milestones = {options.steps * quarter // 4 for quarter in (1, 2, 3, 4)}
    with Display(options.steps) if rank == 0 else contextlib.nullcontext() as display:
        for step in range(options.steps):
            started = time.perf_counter()
            batch = windows(train_text, options.batch, generator)[own]
            recording = step < REPLAYED_STEPS
            for block in model.blocks:
                block.experts.record = [] if recording else None
            loss, scores, counts = model(batch)
            dist.all_reduce(counts)
            balance = sum(
                mok.load_balancing_loss(s, c) for s, c in zip(scores, counts, strict=True)
            )
            optimizer.zero_grad(set_to_none=True)
            (loss + 0.01 * balance).backward()
            if recording:
                recorded.append([Replay.of(block.experts) for block in model.blocks])
            gradients.combine()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options.steps)
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / ranks)
            loads.append(counts.tolist())
            if display:
                speed = options.batch * CONTEXT / (time.perf_counter() - started)
                display.show(step + 1, losses[-1], speed, loads[-1])
            if step + 1 in milestones:
                validation.append((step + 1, validate()))

    gathered = [None] * ranks
    dist.all_gather_object(gathered, recorded)
    code = 0
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        draw(options.out, losses, validation, frequency_loss, loads)
        final = validation[-1][1]
        print(f"validation loss {final:.3f} nats per byte ({final / 0.6931:.2f} bits); "
              f"a model of byte frequencies alone: {frequency_loss:.3f}")  # fmt: skip
        alone = mok.local_group(max_tokens=options.batch * CONTEXT)
        different = set()
        for step in range(len(recorded)):
            for i in range(LAYERS):
                found = replay([gathered[r][step][i] for r in range(ranks)], alone)
                different |= {f"{name} (step {step + 1}, layer {i})" for name in found}
        what = (
            f"replay of the MoE layers of steps 1-{len(recorded)} at EP=1 instead of EP={ranks}: "
        )
        if different:
            print(what + "DIFFERENT bits in " + ", ".join(sorted(different)))
            code = 1
        else:
            print(what + "every bit of outputs and gradients is the same")
        print(f"pictures: {options.out / 'loss.png'}, {options.out / 'expert_load.png'}; "
              f"{time.perf_counter() - begin:.0f} s", flush=True)  # fmt: skip
    dist.barrier()
    return code


def run_rank(rank, ranks, store, options):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    code = train(options)
    dist.destroy_process_group()
    sys.exit(code)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "--device=cuda" in argv or ("--device", "cuda") in itertools.pairwise(argv):
        import train_lm_gpu

        return train_lm_gpu.main(argv)
    options = arguments(argv)
    if "RANK" in os.environ:  # torchrun has started the ranks
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, options)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=run_rank, args=(rank, options.ep, f"{folder}/store", options), daemon=True
            )
            for rank in range(options.ep)
        ]  # fmt: skip
        for process in processes:
            process.start()
        code = 0
        while any(p.is_alive() for p in processes) and code == 0:
            for process in processes:
                process.join(0.2)
                code = code or process.exitcode or 0
        for process in processes:
            if code and process.is_alive():
                process.join(5)
                process.terminate()
            process.join()
            code = code or process.exitcode
    return code


if __name__ == "__main__":
    sys.exit(main())
