"""The layer against an independent PyTorch implementation of the contract."""

import pytest
import torch
from problems import TOLERANCE, flat, problem, run

import reference

SHAPES = {
    "plain": {},
    "top-1": {"topk": 1},
    "all experts": {"experts": 4, "topk": 4, "dropped": 0},
    "shared": {"shared": 7},
    "gated shared": {"shared": 12, "shared_gate": True},
    "limit": {"limit": 0.5, "shared": 5},
    "one expert, one token": {"experts": 1, "topk": 1, "tokens": 1, "dropped": 0},
    "size 1": {"hidden": 1, "inner": 1, "shared": 1},
    "odd sizes": {"hidden": 67, "inner": 33, "tokens": 41, "experts": 5, "topk": 3},
    "tiles": {"hidden": 128, "inner": 64, "tokens": 300, "experts": 3, "topk": 2, "shared": 64},
    "all dropped": {"dropped": 1.1, "shared": 3},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_is_what_the_contract_says(shape, dtype):
    p = problem(hash_of(shape), **SHAPES[shape], dtype=dtype)
    ours = run(p)
    theirs = reference.gradients(
        p.x, p.ids, p.topk_weights, p.weights, p.d_y, p.limit, dtype == torch.bfloat16
    )
    for (name, a), (_, b) in zip(flat(ours), flat(theirs), strict=True):
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert a.dtype == (wanted if name == "d_topk_weights" else dtype), name
        found = reference.error(a, b)
        assert found <= TOLERANCE[dtype], f"{name}: {found}"


def hash_of(text):
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % 2**31


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes_fp64(seed):
    g = torch.Generator().manual_seed(seed)
    pick = lambda lo, hi: int(torch.randint(lo, hi + 1, (), generator=g))  # noqa: E731
    experts = pick(1, 9)
    shared = pick(0, 20)
    p = problem(
        seed, tokens=pick(0, 70), hidden=pick(1, 80), inner=pick(1, 70), experts=experts,
        topk=pick(1, experts), shared=shared, shared_gate=bool(shared and pick(0, 1)),
        limit=0.75 if pick(0, 1) else None, dropped=pick(0, 3) / 4,
    )  # fmt: skip
    theirs = reference.gradients(p.x, p.ids, p.topk_weights, p.weights, p.d_y, p.limit)
    for (name, a), (_, b) in zip(flat(run(p)), flat(theirs), strict=True):
        found = reference.error(a, b)
        assert found <= 1e-11, f"{name}: {found}"


def test_dropped_slots_get_exactly_plus_zero():
    p = problem(3, dropped=0.5, dtype=torch.bfloat16)
    dropped = run(p)[2][p.ids == -1]
    assert len(dropped) and not dropped.view(torch.int32).any()
