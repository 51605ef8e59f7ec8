"""mok.functional: the published interface, its values, and where we go further."""

import dataclasses
import inspect

import mok
import pytest
import ranks
import torch
from mok import functional as F
from problems import TOLERANCE, part, problem, same_bits

import reference
from reference import error

GRADS = ("d_x", "d_router_weights", "d_routed_gate", "d_routed_up", "d_routed_down",
         "d_shared_gate", "d_shared_up", "d_shared_down", "d_shared_gate_vector")  # fmt: skip


@pytest.fixture(autouse=True)
def no_workspaces():
    F.clear_workspace_cache()
    yield
    F.clear_workspace_cache()


def ordered(weights):
    """The six weights of reference.Weights in the interface's order."""
    w = weights
    return w.shared_gate, w.shared_up, w.shared_down, w.gate, w.up, w.down


def start(p, config=None, group=None, most=None):
    """(config, workspace, schedule)."""
    config = config or F.MoKConfig()
    workspace = F.get_workspace(
        config, group, device=p.x.device, num_local_tokens=most or len(p.x),
        hidden_size=p.x.shape[1], topk=p.ids.shape[1],
    )  # fmt: skip
    schedule = F.build_schedule(workspace, config, p.ids, num_local_experts=p.experts)
    return config, workspace, schedule


def run(p, recompute=False, main_grads=None, **settings):
    """{"y": ..., "d_x": ..., ...}"""
    state = start(p, **settings)
    six, vector = ordered(p.weights), p.weights.gate_vector
    more = {} if vector is None else {"shared_gate_vector": vector}
    y, context = F.forward(*state, p.x, p.topk_weights, *six, swiglu_limit=p.limit, **more)
    if recompute:
        context = F.recompute_forward_context(
            *state, p.x, six[0], six[1], six[3], six[4], swiglu_limit=p.limit
        )
    if main_grads is not None:
        more["main_grads"] = main_grads
    grads = F.backward(
        *state, context, p.d_y, p.x, p.topk_weights, *six, swiglu_limit=p.limit, **more
    )
    return {"y": y, **dict(zip(GRADS, grads, strict=False))}


def wanted(p, rounding):
    y, d_x, d_w, w = reference.gradients(
        p.x, p.ids, p.topk_weights, p.weights, p.d_y, p.limit, rounding
    )
    grads = (d_x, d_w, w.gate, w.up, w.down, w.shared_gate, w.shared_up, w.shared_down,
             w.gate_vector)  # fmt: skip
    return {"y": y, **dict(zip(GRADS, grads, strict=True))}


# ---- the interface ---------------------------------------------------------------------------

# (name, keyword only?, default) as published; more keyword arguments with defaults are ours.
NONE = inspect.Parameter.empty
SIX = [
    (f"{kind}_{matrix}_weights", False, NONE)
    for kind in ("shared", "routed")
    for matrix in ("gate", "up", "down")
]
START = [(name, False, NONE) for name in ("config", "workspace", "schedule")]
WORKSPACE = [
    ("config", False, NONE),
    ("group", False, NONE),
    *((name, True, NONE) for name in ("device", "num_local_tokens", "hidden_size", "topk")),
]
LIMIT = ("swiglu_limit", False, None)
X = ("x", False, NONE)
PUBLISHED = {
    "validate_workspace_args": WORKSPACE,
    "create_workspace": WORKSPACE,
    "get_workspace": WORKSPACE,
    "clear_workspace_cache": [],
    "build_schedule": [
        ("workspace", False, NONE),
        ("config", False, NONE),
        ("top_experts", False, NONE),
        ("num_local_experts", True, NONE),
    ],
    "validate_inputs": [*START, X, ("router_weights", False, None), ("grad_output", False, None)],
    "forward": [*START, X, ("router_weights", False, NONE), *SIX, LIMIT],
    "recompute_forward_context": [*START, X, SIX[0], SIX[1], SIX[3], SIX[4], LIMIT],
    "backward": [
        *START,
        *((name, False, NONE) for name in ("forward_context", "grad_output", "x")),
        ("router_weights", False, NONE),
        *SIX,
        LIMIT,
    ],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_signatures(name):
    parameters = list(inspect.signature(getattr(F, name)).parameters.values())
    given = [(p.name, p.kind is p.KEYWORD_ONLY, p.default) for p in parameters]
    assert given[: len(PUBLISHED[name])] == PUBLISHED[name]
    for extra in parameters[len(PUBLISHED[name]) :]:
        assert extra.kind is extra.KEYWORD_ONLY and extra.default is None


def test_config():
    config = F.MoKConfig()
    assert dataclasses.asdict(config) == {
        "fwd_num_comm_sms": 40,
        "bwd_num_comm_sms": 28,
        "minibatch_size": 4096,
        "macrobatch_size": 131072,
        "schedule_capacity_multiplier": 0.5,
        "all_gather_top_experts_chunk_bytes": 2048,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.minibatch_size = 1
    for name in dataclasses.asdict(config):
        for value, kind in (("a", TypeError), (None, TypeError), (True, TypeError),
                            (-1, ValueError)):  # fmt: skip
            with pytest.raises(kind, match=rf"^{name}: "):
                F.MoKConfig(**{name: value})


# ---- values ----------------------------------------------------------------------------------


def test_a_small_program():
    """Written as for the published package: one layer, one step, on one rank."""
    from mok import functional

    tokens, hidden, intermediate, experts, topk = 48, 64, 32, 8, 2
    g = torch.Generator().manual_seed(0)

    def weight(*shape):
        return (torch.randn(shape, generator=g) * shape[-1] ** -0.5).bfloat16()

    shared = (
        weight(intermediate, hidden),
        weight(intermediate, hidden),
        weight(hidden, intermediate),
    )
    routed = (
        weight(experts, intermediate, hidden),
        weight(experts, intermediate, hidden),
        weight(experts, hidden, intermediate),
    )
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    scores = torch.randn(tokens, experts, generator=g).softmax(-1)
    router_weights, top_experts = scores.topk(topk, dim=-1)
    grad_output = torch.randn(tokens, hidden, generator=g).bfloat16()

    config = functional.MoKConfig(minibatch_size=2048, schedule_capacity_multiplier=1.0)
    workspace = functional.get_workspace(
        config, None, device=x.device, num_local_tokens=tokens, hidden_size=hidden, topk=topk
    )
    schedule = functional.build_schedule(workspace, config, top_experts, num_local_experts=experts)
    functional.validate_inputs(config, workspace, schedule, x, router_weights, grad_output)
    output, context = functional.forward(
        config, workspace, schedule, x, router_weights, *shared, *routed
    )
    grads = functional.backward(
        config, workspace, schedule, context, grad_output, x, router_weights, *shared, *routed
    )

    assert output.dtype == torch.bfloat16 and output.shape == x.shape
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32] + [torch.bfloat16] * 6
    y, d_x, d_w, w = reference.gradients(
        x, top_experts, router_weights, reference.Weights(*routed, *shared), grad_output,
        rounding=True,
    )  # fmt: skip
    expected = (d_x, d_w, w.gate, w.up, w.down, w.shared_gate, w.shared_up, w.shared_down)
    assert error(output, y) < 3e-2
    for name, got, want in zip(GRADS, grads, expected, strict=False):
        assert got.shape == want.shape and error(got, want) < 3e-2, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shared": 12},
        {"shared": 40, "shared_gate": True, "limit": 0.75},
        {"tokens": 0, "shared": 4},
        {"topk": 1, "limit": 1.5},
    ],
    ids=str,
)
def test_values(settings, dtype):
    p = problem(24, dtype=dtype, **settings)
    got, want = run(p), wanted(p, dtype == torch.bfloat16)
    count = 10 if p.weights.gate_vector is not None else 9
    assert len(got) == count
    for name, value in got.items():
        if want[name] is None:
            assert value is None, name
        else:
            assert error(value, want[name]) < TOLERANCE[dtype], name


def test_same_bits_as_the_other_interfaces():
    p = problem(12, shared=6, dtype=torch.bfloat16)
    mine = run(p)
    leaves = [
        t.detach().clone().requires_grad_() for t in (p.x, p.topk_weights, *ordered(p.weights))
    ]
    x, router_weights, *six = leaves
    y = mok.moe(x, p.ids, router_weights, *six[3:], *six[:3])
    y.backward(p.d_y)
    grads = [y, x.grad, router_weights.grad, *(t.grad for t in (*six[3:], *six[:3]))]
    # forward is itself differentiable.
    state = start(p)
    for t in leaves:
        t.grad = None
    z, _ = F.forward(*state, x, router_weights, *six)
    z.backward(p.d_y)
    again = [z, x.grad, router_weights.grad, *(t.grad for t in (*six[3:], *six[:3]))]
    for name, a, b, c in zip(mine, mine.values(), grads, again, strict=True):
        assert same_bits(a, b) and same_bits(a, c), name


@pytest.mark.parametrize("multiplier", [0.0, 0.1, 1.0, 3.0])
def test_capacity_and_recomputation_change_no_bit(multiplier):
    p = problem(13, tokens=200, shared=6, dtype=torch.bfloat16)
    want = run(p)
    config = F.MoKConfig(schedule_capacity_multiplier=multiplier)
    for recompute in (False, True):
        got = run(p, recompute=recompute, config=config)
        for name in want:
            assert same_bits(got[name], want[name]), name


def test_main_grads():
    p = problem(14, shared=6, shared_gate=True, dtype=torch.bfloat16)
    plain = run(p)
    seven = (*ordered(p.weights), p.weights.gate_vector)
    main = [torch.full(w.shape, 2.0) for w in seven]
    main[1] = None
    got = run(p, main_grads=tuple(main))
    for i, name in enumerate((*GRADS[5:8], *GRADS[2:5], GRADS[8])):
        if main[i] is None:
            assert same_bits(got[name], plain[name])
        else:
            assert got[name] is None
            assert error(main[i] - 2.0, plain[name]) < 1e-2
    assert same_bits(got["d_x"], plain["d_x"])


def test_micro_batches_in_flight():
    a, b = (problem(seed, dtype=torch.bfloat16) for seed in (15, 16))
    b.weights = a.weights
    want = run(a), run(b)
    state_a, state_b = start(a), start(b)
    assert state_a[1] is state_b[1]  # one workspace
    six = ordered(a.weights)
    forwards = [F.forward(*s, p.x, p.topk_weights, *six) for s, p in ((state_a, a), (state_b, b))]
    for p, state, (y, context), expected in (
        (a, state_a, forwards[0], want[0]),
        (b, state_b, forwards[1], want[1]),
    ):
        grads = F.backward(*state, context, p.d_y, p.x, p.topk_weights, *six)
        assert same_bits(y, expected["y"])
        for name, grad in zip(GRADS, grads, strict=False):
            assert (grad is None and expected[name] is None) or same_bits(grad, expected[name]), (
                name
            )


# ---- schedules -------------------------------------------------------------------------------


def rows_of(schedule, ids_of, rank, local, topk):
    """Checks a schedule against the definition; ids_of: [R] of [T, K]."""
    tile = F.TILE_ROWS
    begin = 0
    assert schedule.peer_rank.dtype == schedule.peer_token_idx.dtype == torch.int32
    for e in range(local):
        rows = [
            (r, t * topk + k)
            for r, ids in enumerate(ids_of)
            for t, row in enumerate(ids.tolist())
            for k, expert in enumerate(row)
            if expert == rank * local + e
        ]
        padded = -(-len(rows) // tile) * tile
        assert schedule.tokens_per_expert[e] == padded
        got = list(zip(schedule.peer_rank[begin : begin + padded].tolist(),
                       schedule.peer_token_idx[begin : begin + padded].tolist(),
                       strict=True))  # fmt: skip
        assert got[: len(rows)] == rows
        assert all(r == -1 for r, _ in got[len(rows) :])
        begin += padded
    assert schedule.num_tokens.tolist() == [begin]
    assert schedule.num_tokens.dtype == schedule.tokens_per_expert.dtype == torch.int32
    assert (schedule.peer_rank[begin:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_schedule(dtype):
    for tokens in (0, 1, 300):
        p = problem(17, tokens=tokens, topk=3, dropped=0.2)
        p.ids = p.ids.to(dtype)
        _, _, schedule = start(p)
        rows_of(schedule, [p.ids], 0, p.experts, 3)
    p.ids[:] = 2  # all to one
    _, _, schedule = start(p)
    rows_of(schedule, [p.ids], 0, p.experts, 3)


# ---- ranks -----------------------------------------------------------------------------------


def _on_ranks(rank, p, splits, most):
    mine = part(p, rank, splits)
    import torch.distributed as dist

    got = run(mine, group=dist.group.WORLD, most=most)
    _, workspace, schedule = start(mine, group=dist.group.WORLD, most=most)
    lo = [sum(splits[:r]) for r in range(len(splits))]
    everyone = [p.ids[a : a + n] for a, n in zip(lo, splits, strict=True)]
    rows_of(schedule, everyone, rank, mine.experts, p.ids.shape[1])
    assert workspace.num_local_tokens == (most or max(splits))
    return got


@pytest.mark.parametrize(("splits", "most"), [((7, 6), 20), ((13, 0), None), ((3, 4, 6), 13)],
                         ids=str)  # fmt: skip
def test_ranks_have_the_bits_of_one(splits, most):
    p = problem(18, tokens=13, experts=6, shared=6, dtype=torch.bfloat16)
    want = run(p)
    got = ranks.run(len(splits), _on_ranks, p, splits, most)
    for name in ("y", *GRADS[:2]):
        assert same_bits(torch.cat([each[name] for each in got]), want[name]), name
    for name in GRADS[2:5]:
        assert same_bits(torch.cat([each[name] for each in got]), want[name]), name
    for name in GRADS[5:8]:
        assert error(sum(each[name].double() for each in got), want[name]) < 2e-2, name


def _grow(rank, p, splits):
    import torch.distributed as dist

    mine = part(p, rank, splits)
    group, six = dist.group.WORLD, ordered(mine.weights)
    small = start(mine, group=group, most=8)
    y, context = F.forward(*small, mine.x, mine.topk_weights, *six)
    large = start(mine, group=group, most=30)  # grows while a backward is still to come
    again, _ = F.forward(*large, mine.x, mine.topk_weights, *six)
    assert same_bits(y, again)
    F.backward(*small, context, mine.d_y, mine.x, mine.topk_weights, *six)
    assert start(mine, group=group, most=8)[1] is large[1]
    return small[1].num_local_tokens, large[1].num_local_tokens


def test_a_larger_workspace_is_made_collectively():
    p = problem(19, experts=4, dtype=torch.bfloat16)
    assert ranks.run(2, _grow, p, (6, 7)) == [(8, 30)] * 2


def _refuse(rank, p, splits, what):
    import torch.distributed as dist

    mine = part(p, rank, splits)
    group, six = dist.group.WORLD, ordered(mine.weights)
    run(mine, group=group, most=8)
    messages = []
    for _ in range(2):
        try:
            bad = rank == 1
            config, workspace, _ = start(mine, group=group, most=8)
            ids = mine.ids.clone()
            if what == "id":
                ids[:, 0] = 99 if bad else ids[:, 0]
            elif what == "ids" and bad:
                ids = ids.double()
            schedule = F.build_schedule(workspace, config, ids, num_local_experts=mine.experts)
            x = mine.x.double() if what == "x" and bad else mine.x
            F.forward(config, workspace, schedule, x, mine.topk_weights, *six)
        except (ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__} {error}")
    run(mine, group=group, most=8)
    return messages


@pytest.mark.parametrize(
    ("what", "there", "here"),
    [
        ("id", "rank 1, token 0, slot 0: id 99", "rank 1, token 0, slot 0: id 99"),
        ("ids", "ValueError top_experts: dtype", "rank 1's arguments were refused"),
        ("x", "ValueError x: dtype", "rank 1"),
    ],
)
def test_a_rank_that_is_refused_fails_the_others(what, there, here):
    p = problem(20, experts=4, dtype=torch.bfloat16)
    other, bad = ranks.run(2, _refuse, p, (6, 7), what)
    assert len(bad) == len(other) == 2
    assert all(there in message for message in bad)
    assert all(here in message for message in other)


# ---- errors ----------------------------------------------------------------------------------


def test_workspace_errors():
    good = {"config": F.MoKConfig(), "group": None, "device": "cpu", "num_local_tokens": 4,
            "hidden_size": 8, "topk": 2}  # fmt: skip
    F.validate_workspace_args(**good)
    for name, value, kind in (
        ("config", None, TypeError),
        ("config", {}, TypeError),
        ("group", "all", TypeError),
        ("device", None, TypeError),
        ("device", "cqu", ValueError),
        ("device", "meta", ValueError),
        ("num_local_tokens", "4", TypeError),
        ("num_local_tokens", 4.0, TypeError),
        ("num_local_tokens", -1, ValueError),
        ("hidden_size", 0, ValueError),
        ("hidden_size", None, TypeError),
        ("topk", 0, ValueError),
        ("topk", 65, ValueError),
        ("topk", True, TypeError),
    ):
        for function in (F.validate_workspace_args, F.create_workspace, F.get_workspace):
            with pytest.raises(kind, match=rf"^{name}: "):
                function(**{**good, name: value})


def test_schedule_errors():
    p = problem(21)
    config, workspace, _ = start(p)
    for change, kind, name in (
        ({"workspace": None}, TypeError, "workspace"),
        ({"config": None}, TypeError, "config"),
        ({"num_local_experts": 0}, ValueError, "num_local_experts"),
        ({"num_local_experts": 2.0}, TypeError, "num_local_experts"),
        ({"top_experts": p.ids.tolist()}, TypeError, "top_experts"),
        ({"top_experts": p.ids.float()}, ValueError, "top_experts"),
        ({"top_experts": p.ids[:, :1]}, ValueError, "top_experts"),
        ({"top_experts": p.ids[0]}, ValueError, "top_experts"),
        ({"top_experts": torch.cat([p.ids, p.ids])}, ValueError, "top_experts"),
        ({"top_experts": p.ids.to("meta")}, ValueError, "top_experts"),
        ({"top_experts": torch.full_like(p.ids, 6)}, ValueError, "top_experts"),
        ({"top_experts": torch.full_like(p.ids, -2)}, ValueError, "top_experts"),
    ):
        arguments = {"workspace": workspace, "config": config, "top_experts": p.ids,
                     "num_local_experts": p.experts, **change}  # fmt: skip
        with pytest.raises(kind, match=rf"^{name}: "):
            F.build_schedule(**arguments)


def test_layer_errors():
    p = problem(22, shared=4, shared_gate=True, dtype=torch.bfloat16)
    config, workspace, schedule = start(p)
    names = [name for name, _, _ in SIX]
    arguments = {
        "config": config, "workspace": workspace, "schedule": schedule, "x": p.x,
        "router_weights": p.topk_weights, **dict(zip(names, ordered(p.weights), strict=True)),
        "shared_gate_vector": p.weights.gate_vector,
    }  # fmt: skip
    want, context = F.forward(**arguments)
    backward = {**arguments, "forward_context": context, "grad_output": p.d_y}
    for name, value in backward.items():
        changes = [("a", TypeError)]
        if isinstance(value, torch.Tensor):
            changes += [(value[..., :-1], ValueError), (value[0], ValueError),
                        (value.to("meta"), ValueError), (value.half(), ValueError)]  # fmt: skip
        also = r"|x|shared_\w+_weights|routed_\w+_weights" if name in names else ""
        for change, kind in changes:
            for function, given in ((F.forward, arguments), (F.backward, backward)):
                if name in given:
                    with pytest.raises(kind, match=rf"^({name}{also}): "):
                        function(**{**given, name: change})
        if name in ("x", "router_weights", "grad_output"):
            if isinstance(value, torch.Tensor) and name in arguments:
                checks = {"config": config, "workspace": workspace, "schedule": schedule,
                          "x": p.x}  # fmt: skip
                with pytest.raises(ValueError, match=rf"^{name}: "):
                    F.validate_inputs(**{**checks, name: value[..., :-1]})
    with pytest.raises(ValueError, match=r"give all of them or none"):
        F.forward(**{**arguments, "shared_up_weights": None})
    with pytest.raises(ValueError, match=r"^shared_gate_vector: given without"):
        F.forward(**{**arguments, **dict.fromkeys(names[:3])})
    for limit, kind in ((0.0, ValueError), (float("nan"), ValueError), ("a", TypeError)):
        with pytest.raises(kind, match=r"^swiglu_limit: "):
            F.forward(**arguments, swiglu_limit=limit)
    rest = (None,) * 6
    for main, kind in (
        ([], TypeError),
        ((None,), ValueError),
        ((p.d_y, *rest), ValueError),
        ((1, *rest), TypeError),
    ):
        with pytest.raises(kind, match=r"^main_grads"):
            F.backward(**backward, main_grads=main)
    assert same_bits(F.forward(**arguments)[0], want)


def test_the_cache():
    p = problem(23)
    config, workspace, _ = start(p)
    assert start(p)[1] is workspace
    assert start(p, config=F.MoKConfig(minibatch_size=64))[1] is workspace
    assert start(p, config=F.MoKConfig(schedule_capacity_multiplier=2.0))[1] is not workspace
    assert start(p, most=8 * len(p.x))[1] is not workspace
    made = F.create_workspace(
        config, None, device="cpu", num_local_tokens=4, hidden_size=24, topk=2
    )
    assert made is not start(p)[1]
    F.clear_workspace_cache()
    assert start(p)[1] is not workspace
