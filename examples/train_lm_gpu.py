"""train_lm.py --device cuda: a byte-level language model with layers of Qwen3-30B-A3B's shape (H
2048, 128 experts of I 768, top 8), trained from the same start on the same data with mok.MoELayer
and with a layer of PyTorch's own parts (plain_moe.py: NCCL all-to-all and torch._grouped_mm).
Prints the losses and the tokens per second of both. How far bf16's rounding alone lets losses
drift is shown by a third training, plain again with each batch's sequences in another order.

    python examples/train_lm.py --device cuda
    torchrun --nproc-per-node 2 examples/train_lm.py --device cuda
"""

import argparse
import gc
import math
import os
import statistics
import time

import mok
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mok.models import preset
from torch import nn

HEADS, KV_HEADS, HEAD = 32, 4, 128
SHAPE = preset("qwen3-30b-a3b")
PEAK_RATE = 1e-4


def arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a sequence (2048)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a pass and GPU (4)")
    parser.add_argument("--passes", type=int, default=4, help="passes of a step (4)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


class MokExperts(nn.Module):
    def __init__(self, device, dtype):
        super().__init__()
        self.layer = mok.MoELayer(
            SHAPE.hidden, SHAPE.intermediate, SHAPE.experts, SHAPE.topk, router=None,
            layout="stacked", device=device, dtype=dtype,
        )  # fmt: skip
        self.w_gate_up, self.w_down = self.layer.w_gate_up, self.layer.w_down

    def forward(self, x, ids, weights):
        return self.layer(x, topk_ids=ids, topk_weights=weights)


def make_experts(kind, device, dtype):
    if kind == "mok":
        return MokExperts(device, dtype)
    from plain_moe import PlainExperts

    return PlainExperts(SHAPE.hidden, SHAPE.intermediate, SHAPE.experts, device, dtype)


class Block(nn.Module):
    """Attention, router and experts; all but the experts is the same code for both kinds."""

    def __init__(self, kind, device, dtype):
        super().__init__()
        hidden = SHAPE.hidden
        linear = lambda i, o: nn.Linear(i, o, bias=False, device=device, dtype=dtype)  # noqa: E731
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, device=device, dtype=dtype) for _ in range(2))
        self.qkv = linear(hidden, (HEADS + 2 * KV_HEADS) * HEAD)
        self.out = linear(HEADS * HEAD, hidden)
        self.router_weight = nn.Parameter(torch.empty(SHAPE.experts, hidden, device=device))
        self.experts = make_experts(kind, device, dtype)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, -1, HEAD).transpose(1, 2)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        flat = self.norms[1](x).flatten(0, 1)
        logits = F.linear(flat.float(), self.router_weight)
        ids, weights, scores = mok.route(logits, SHAPE.topk, SHAPE.router)
        y = self.experts(flat, ids, weights)
        balance = mok.load_balancing_loss(scores, mok.expert_counts(ids, SHAPE.experts))
        return x + y.view(x.shape), balance


class Model(nn.Module):
    def __init__(self, kind, options, device, dtype=torch.bfloat16):
        super().__init__()
        make = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(256, SHAPE.hidden, **make)
        self.position = nn.Embedding(options.context, SHAPE.hidden, **make)
        self.blocks = nn.ModuleList(Block(kind, **make) for _ in range(options.layers))
        self.norm = nn.RMSNorm(SHAPE.hidden, **make)
        self.head = nn.Linear(SHAPE.hidden, 256, bias=False, **make)
        self.reset(options.seed, device)

    @torch.no_grad()
    def reset(self, seed, device):
        """The same values for both kinds and for any number of GPUs."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator(device)
        dense = [p for p in self.parameters() if p.dim() == 2]
        for i, p in enumerate(dense):
            generator.manual_seed(1_000_003 * seed + i)
            std = 0.05 if p is self.embedding.weight or p is self.position.weight else None
            p.normal_(std=std or p.shape[1] ** -0.5, generator=generator)
        for i, block in enumerate(self.blocks):
            for j, stack in enumerate((block.experts.w_gate_up, block.experts.w_down)):
                for e, matrix in enumerate(stack):
                    expert = rank * len(stack) + e
                    generator.manual_seed(((seed * 2 + j) * 1000 + i) * 10_000 + expert + 12345)
                    matrix.normal_(std=matrix.shape[1] ** -0.5, generator=generator)

    def expert_parameters(self):
        return [w for b in self.blocks for w in (b.experts.w_gate_up, b.experts.w_down)]

    def forward(self, tokens):
        """tokens [B, context + 1] -> (cross-entropy, balancing loss)."""
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        balance = 0.0
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), balance


def average(parameters, ranks):
    """Sums the replicated parameters' gradients over the ranks, one message for each dtype."""
    if ranks == 1:
        return
    # In the order of the parameters: a set's differs between processes, and then one rank's bf16
    # sums would meet the other's fp32 ones.
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        grads = [p.grad for p in parameters if p.dtype == dtype]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))


def batches(options, text, ranks, rank, reverse):
    """Each step's passes: [passes, batch, context + 1] bytes of this rank."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    count = options.passes * options.batch
    for _ in range(options.steps):
        starts = torch.randint(
            len(text) - options.context - 1, (ranks * count,), generator=generator
        )
        own = starts[rank * count : (rank + 1) * count]
        rows = text[own[:, None] + torch.arange(options.context + 1)]
        rows = rows.view(options.passes, options.batch, -1)
        yield rows.flip(1) if reverse else rows


def train(kind, options, text, device, ranks, rank, reverse=False):
    """(losses, seconds of each step, peak GiB)."""
    model = Model(kind, options, device)
    experts = {id(p) for p in model.expert_parameters()}
    replicated = [p for p in model.parameters() if id(p) not in experts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    torch.cuda.reset_peak_memory_stats(device)
    losses, seconds = [], []
    for step, rows in enumerate(batches(options, text, ranks, rank, reverse)):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / 10)
        rows = rows.to(device).long()
        mean = torch.zeros((), device=device)
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for batch in rows:
            loss, balance = model(batch)
            # Experts' gradients are sums over all ranks' tokens, so each loss is its share.
            ((loss + 0.01 * balance) / (ranks * options.passes)).backward()
            mean += loss.detach() / (ranks * options.passes)
        average(replicated, ranks)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"{kind}: the loss of step {step + 1} is {losses[-1]}")
    return losses, seconds, torch.cuda.max_memory_allocated(device) / 2**30


def report(results, options, ranks, tokens):
    (plain, slow), (ours, fast), (again, _) = (results[n] for n in ("plain", "mok", "plain again"))
    shown = {0, *range(4, options.steps, 5), options.steps - 1}
    for step in range(options.steps) if options.steps <= 10 else sorted(shown):
        print(f"step {step + 1:4d}: loss {plain[step]:.4f} plain, {ours[step]:.4f} mok, "
              f"{again[step]:.4f} plain again")  # fmt: skip

    def apart(other):
        parts = [abs(a - b) / b for a, b in zip(other, plain, strict=True)]
        return f"{100 * statistics.mean(parts):.2f}% in the mean, {100 * max(parts):.2f}% at most"

    print(f"{ranks} GPU(s), {options.layers} layers, {tokens} tokens a step: from plain's losses "
          f"mok's differ by {apart(ours)}; plain again by {apart(again)}; "
          f"mok trains {fast / slow:.2f} times as fast", flush=True)  # fmt: skip


def main(argv):
    from train_lm import read_text

    options = arguments(argv)
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # of the router
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    mok.init(max_tokens=options.batch * options.context)
    text = torch.frombuffer(bytearray(read_text()[0]), dtype=torch.uint8)
    tokens = ranks * options.passes * options.batch * options.context
    results = {}
    for name in ("plain", "mok", "plain again"):
        kind = name.split()[0]
        losses, seconds, memory = train(
            kind, options, text, device, ranks, rank, reverse=name == "plain again"
        )
        gc.collect()
        torch.cuda.empty_cache()
        middle = statistics.median(seconds[len(seconds) // 4 :])  # without compiling
        memory += mok.default_group().memory_bytes() / 2**30 if kind == "mok" else 0
        results[name] = losses, tokens / middle
        if rank == 0:
            print(f"{name}: {tokens / middle:,.0f} tokens/s ({1e3 * middle:.1f} ms a step), "
                  f"{memory:.1f} GiB on a GPU", flush=True)  # fmt: skip
    if rank == 0:
        report(results, options, ranks, tokens)
    if ranks > 1:
        dist.destroy_process_group()
    return 0
