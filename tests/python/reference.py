"""The contract once more, independently of the library: PyTorch, a loop over experts, autograd.

Everything is computed in float64. With ``rounding`` the stated roundings to bf16 are made, forward
and backward; sums stay in float64.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F


def bf16(t):
    return t.to(torch.bfloat16).to(t.dtype)


class _Round(torch.autograd.Function):
    """Rounds the value; the gradient passes."""

    @staticmethod
    def forward(ctx, t):
        return bf16(t)

    @staticmethod
    def backward(ctx, d):
        return d


class _RoundGradient(torch.autograd.Function):
    """Rounds the gradient; the value passes."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, d):
        return bf16(d)


class _ScaledDown(torch.autograd.Function):
    """w * round(h @ down.T), whose backward applies w after d_y @ down has been rounded."""

    @staticmethod
    def forward(ctx, h, w, down, rounding, from_rows):
        r = h @ down.T
        if rounding:
            r = bf16(r)
        ctx.save_for_backward(h, w, down, r)
        ctx.rounding, ctx.from_rows = rounding, from_rows
        return w[:, None] * r

    @staticmethod
    def backward(ctx, d_y):
        h, w, down, r = ctx.saved_tensors
        round_ = bf16 if ctx.rounding else (lambda t: t)
        d_h = round_(d_y @ down)
        d_w = (d_y * r).sum(1) if ctx.from_rows else (d_h * h).sum(1)
        d_down = d_y.T @ round_(w[:, None] * h)
        return w[:, None] * d_h, d_w, d_down, None, None


@dataclass
class Weights:
    """All experts': [E, I, H], [E, I, H], [E, H, I]; [I_s, H], [I_s, H], [H, I_s]; [1, H]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    shared_gate: torch.Tensor | None = None
    shared_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    gate_vector: torch.Tensor | None = None

    def each(self):
        return [getattr(self, field.name) for field in fields(self)]


def expert(x, w, gate, up, down, limit, rounding, from_rows=False):
    """w * what an expert makes of the rows x."""
    pass_ = lambda t: t  # noqa: E731
    round_, round_gradient = (_Round.apply, _RoundGradient.apply) if rounding else (pass_, pass_)
    x = round_gradient(x)
    g, u = (round_gradient(round_(x @ m.T)) for m in (gate, up))
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    h = round_(F.silu(g) * u)
    return _ScaledDown.apply(h, w, down, rounding, from_rows)


def moe(x, ids, topk_weights, weights, limit=None, rounding=False):
    """y [G, H] of all tokens; leaves are float64."""
    total = torch.zeros_like(x)
    round_gradient = _RoundGradient.apply if rounding else (lambda t: t)
    x = round_gradient(x)
    if weights.shared_gate is not None:
        sigma = torch.ones(len(x), dtype=x.dtype)
        if weights.gate_vector is not None:
            sigma = torch.sigmoid(x @ weights.gate_vector[0])
        total = expert(
            x, sigma, weights.shared_gate, weights.shared_up, weights.shared_down, limit, rounding,
            from_rows=True,
        )  # fmt: skip
    for e in range(weights.gate.shape[0]):
        t, k = (ids == e).nonzero(as_tuple=True)
        if len(t):
            rows = expert(
                x[t], topk_weights[t, k], weights.gate[e], weights.up[e], weights.down[e], limit,
                rounding,
            )  # fmt: skip
            total = total.index_add(0, t, rows)
    return _Round.apply(total) if rounding else total


def gradients(x, ids, topk_weights, weights, d_y, limit=None, rounding=False):
    """(y, d_x, d_topk_weights, Weights of gradients), all float64, from tensors of any dtype."""
    leaves = [
        None if t is None else t.detach().double().requires_grad_()
        for t in (x, topk_weights, *weights.each())
    ]
    y = moe(leaves[0], ids, leaves[1], Weights(*leaves[2:]), limit, rounding)
    y.backward(d_y.double())
    grads = [
        None if t is None else torch.zeros_like(t) if t.grad is None else t.grad for t in leaves
    ]
    return y.detach(), grads[0], grads[1], Weights(*grads[2:])


def error(a, b, columns=64):
    """Largest ||a - b|| / ||b|| over rows and over blocks of columns; absolute where b is 0."""
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape, (a.shape, b.shape)
    if a.numel() == 0:
        return 0.0
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    worst = 0.0
    for lo in range(0, a.shape[1], columns):
        d, n = (a - b)[:, lo : lo + columns].norm(dim=1), b[:, lo : lo + columns].norm(dim=1)
        worst = max(worst, torch.where(n > 0, d / n, d).max().item())
    return worst
