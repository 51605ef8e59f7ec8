"""Random problems, and the layer run over them."""

from dataclasses import dataclass

import mok
import torch

from reference import Weights

TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 2e-4, torch.float64: 1e-11}


@dataclass
class Problem:
    x: torch.Tensor  # [G, H]
    ids: torch.Tensor  # [G, K]
    topk_weights: torch.Tensor
    weights: Weights
    d_y: torch.Tensor
    limit: float | None = None

    @property
    def experts(self):
        return self.weights.gate.shape[0]


def sum_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def problem(
    seed, tokens=13, hidden=24, inner=10, experts=6, topk=2, shared=0, shared_gate=False,
    limit=None, dropped=0.1, dtype=torch.float64,
):  # fmt: skip
    print(f"seed {seed}")
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).to(dtype)

    def matrix(*shape):
        return normal(*shape, scale=2 * shape[-1] ** -0.5)

    ids = torch.rand((tokens, experts), generator=g).argsort(1)[:, :topk].contiguous()
    if dropped:
        ids[torch.rand(ids.shape, generator=g) < dropped] = -1
    weights = Weights(
        matrix(experts, inner, hidden),
        matrix(experts, inner, hidden),
        matrix(experts, hidden, inner),
    )
    if shared:
        weights.shared_gate, weights.shared_up = matrix(shared, hidden), matrix(shared, hidden)
        weights.shared_down = matrix(hidden, shared)
        if shared_gate:
            weights.gate_vector = matrix(1, hidden)
    topk_weights = torch.randn(ids.shape, generator=g, dtype=torch.float64).to(sum_dtype(dtype))
    return Problem(
        normal(tokens, hidden), ids, topk_weights, weights, normal(tokens, hidden), limit
    )


def leaves(p):
    """x, topk_weights and the seven weights, requiring grad."""
    return [
        None if t is None else t.detach().clone().requires_grad_()
        for t in (p.x, p.topk_weights, *p.weights.each())
    ]


def run(p, group=None, **settings):
    """(y, d_x, d_topk_weights, Weights of gradients)."""
    tensors = leaves(p)
    y = mok.moe(
        tensors[0], p.ids, tensors[1], *tensors[2:], swiglu_limit=p.limit, group=group, **settings
    )
    y.backward(p.d_y)
    grads = [None if t is None else t.grad for t in tensors]
    return y.detach(), grads[0], grads[1], Weights(*grads[2:])


def run_sharded(p, ranks):
    """As `run` of a rank's share, with its experts as DTensors over the group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(p.x.device.type, (ranks,), mesh_dim_names=("ep",))
    tensors = leaves(p)
    for i in (2, 3, 4):
        tensors[i] = DTensor.from_local(tensors[i].detach(), mesh, [Shard(0)]).requires_grad_()
        assert tensors[i].shape[0] == ranks * p.experts
    y = mok.moe(tensors[0], p.ids, tensors[1], *tensors[2:])
    y.backward(p.d_y)
    for i in (2, 3, 4):
        assert isinstance(tensors[i].grad, DTensor) and tensors[i].grad.placements == (Shard(0),)
    grads = [None if t is None else t.grad for t in tensors]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    return y.detach(), local[0], local[1], Weights(*local[2:])


def part(p, rank, splits):
    """A rank's share: `splits` tokens per rank and E / R experts."""
    lo = sum(splits[:rank])
    t = slice(lo, lo + splits[rank])
    local = p.experts // len(splits)
    e = slice(rank * local, (rank + 1) * local)
    w = p.weights
    return Problem(
        p.x[t], p.ids[t], p.topk_weights[t],
        Weights(w.gate[e], w.up[e], w.down[e], *w.each()[3:]), p.d_y[t], p.limit,
    )  # fmt: skip


def whole(results):
    """Ranks' results of `run` put together; the shared expert's gradients are added up."""
    join = lambda pick: torch.cat([pick(r) for r in results])  # noqa: E731
    routed = [join(lambda r, i=i: r[3].each()[i]) for i in range(3)]
    shared = [
        None if results[0][3].each()[i] is None else sum(r[3].each()[i].double() for r in results)
        for i in range(3, 7)
    ]
    return (
        join(lambda r: r[0]),
        join(lambda r: r[1]),
        join(lambda r: r[2]),
        Weights(*routed, *shared),
    )


def flat(result):
    """Names and tensors of a result of `run`."""
    y, d_x, d_topk_weights, w = result
    names = ("y", "d_x", "d_topk_weights", "d_gate", "d_up", "d_down", "d_shared_gate",
             "d_shared_up", "d_shared_down", "d_gate_vector")  # fmt: skip
    return [
        (n, t)
        for n, t in zip(names, (y, d_x, d_topk_weights, *w.each()), strict=True)
        if t is not None
    ]


def same_bits(a, b):
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def assert_same_bits(result, other, only=None):
    for (name, a), (_, b) in zip(flat(result), flat(other), strict=True):
        if only is None or name in only:
            assert same_bits(a, b), (
                f"{name}: {(a != b).sum().item()} of {a.numel()} elements differ"
            )
