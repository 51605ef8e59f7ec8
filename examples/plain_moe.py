"""A mixture-of-experts layer of PyTorch's own parts, to compare with: rows are sorted by expert,
sent with NCCL's all-to-all, multiplied by torch._grouped_mm, sent back and added up.

The element-wise parts are compiled, rows move by plain gathers in both directions (no atomics), and
the host waits once a layer, for the sizes that all-to-all needs.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@torch.compile(dynamic=True)
def swiglu(gate_up):  # [rows, 2I] -> [rows, I]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.compile(dynamic=True)
def weighted_sum(rows, weights):  # [T, K, H], [T, K] -> [T, H]
    return (rows * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


class Repeat(torch.autograd.Function):
    """x [T, H] -> its rows in the order of the slots, [T * K, H]."""

    @staticmethod
    def forward(ctx, x, order, inverse, topk):
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return x.index_select(0, order // topk)

    @staticmethod
    def backward(ctx, d_rows):
        (inverse,) = ctx.saved_tensors
        d_x = d_rows.index_select(0, inverse).view(-1, ctx.topk, d_rows.shape[1]).sum(1)
        return d_x, None, None, None


class Permute(torch.autograd.Function):
    """rows[order]; `inverse` is the inverse of that permutation."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, d_rows):
        (inverse,) = ctx.saved_tensors
        return d_rows.index_select(0, inverse), None, None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, received, sent):
        ctx.splits = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent)
        return out

    @staticmethod
    def backward(ctx, d_out):
        received, sent = ctx.splits
        d_rows = d_out.new_empty(sum(received), d_out.shape[1])
        dist.all_to_all_single(d_rows, d_out.contiguous(), received, sent)
        return d_rows, None, None


def inverse_of(order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class PlainExperts(nn.Module):
    """The experts of all ranks of torch.distributed (or of this process), E / R on each.

    Parameters as MoELayer(layout="stacked"): w_gate_up [E_local, 2I, H], w_down [E_local, H, I].
    """

    def __init__(self, hidden, intermediate, experts, device, dtype):
        super().__init__()
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.experts, self.local = experts, experts // self.ranks
        make = lambda *shape: nn.Parameter(torch.empty(shape, device=device, dtype=dtype))  # noqa: E731
        self.w_gate_up = make(self.local, 2 * intermediate, hidden)
        self.w_down = make(self.local, hidden, intermediate)

    def multiply(self, rows, ends):
        """rows, sorted by expert, each expert's ending at its entry of `ends`."""
        gate_up = torch._grouped_mm(rows, self.w_gate_up.transpose(1, 2), offs=ends)
        return torch._grouped_mm(swiglu(gate_up), self.w_down.transpose(1, 2), offs=ends)

    def forward(self, x, ids, weights):
        """x [T, H], ids [T, K], weights fp32 [T, K] -> [T, H]."""
        tokens, topk = ids.shape
        order = ids.flatten().argsort(stable=True)
        inverse = inverse_of(order)
        counts = torch.bincount(ids.flatten(), minlength=self.experts)  # [E] of this rank
        rows = Repeat.apply(x, order, inverse, topk)
        if self.ranks == 1:
            rows = self.multiply(rows, counts.cumsum(0).int())
        else:
            rows = self.multiply_everywhere(rows, counts)
        rows = Permute.apply(rows, inverse, order)
        return weighted_sum(rows.view(tokens, topk, -1), weights)

    def multiply_everywhere(self, rows, counts):
        theirs = torch.empty_like(counts)  # [R, E_local]: rows that come from each rank
        dist.all_to_all_single(theirs, counts)
        by_rank = torch.stack([counts, theirs]).view(2, self.ranks, self.local).sum(2)
        sent, received = by_rank.tolist()  # the host waits here
        rows = AllToAll.apply(rows, received, sent)
        # What arrived is sorted by rank, then by expert.
        expert = torch.arange(self.local, device=rows.device).repeat(self.ranks)
        expert = expert.repeat_interleave(theirs, output_size=len(rows))
        order = expert.argsort(stable=True)
        inverse = inverse_of(order)
        ends = theirs.view(self.ranks, self.local).sum(0).cumsum(0).int()
        rows = self.multiply(Permute.apply(rows, order, inverse), ends)
        return AllToAll.apply(Permute.apply(rows, inverse, order), sent, received)
