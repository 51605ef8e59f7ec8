"""Several ranks: processes with gloo and shared memory. The same bits for every EP degree."""

import os
import signal
import time

import mok
import pytest
import ranks
import torch
import torch.distributed as dist
from modules import check_fully_sharded, leave_experts_to_their_ranks
from problems import (
    TOLERANCE,
    assert_same_bits,
    flat,
    leaves,
    part,
    problem,
    run,
    run_sharded,
    same_bits,
    whole,
)

from reference import Weights, error, gradients

ROUTED = ("y", "d_x", "d_topk_weights", "d_gate", "d_up", "d_down")


def run_part(rank, p, splits, settings):
    return run(part(p, rank, splits), **settings)


def run_split(p, splits, options=None, **settings):
    results = ranks.run(
        len(splits), run_part, p, splits, settings, max_tokens=max(*splits, 1), options=options
    )
    return whole(results)


@pytest.mark.parametrize("splits", [(10, 10), (3, 17), (20, 0), (7, 0, 8, 5)], ids=str)
def test_E1_same_bits_for_every_number_of_ranks(splits):
    p = problem(1, tokens=20, hidden=40, inner=24, experts=8, topk=3, shared=8, shared_gate=True,
                limit=0.75, dtype=torch.bfloat16)  # fmt: skip
    alone = run(p)
    together = run_split(p, splits)
    assert_same_bits(together, alone, only=ROUTED)
    # The shared expert's gradients are of the ranks' own tokens: their sum is nearly R=1's.
    for a, b in zip(together[3].each()[3:], alone[3].each()[3:], strict=True):
        assert error(a, b) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_E1_without_roundings(dtype):
    p = problem(2, tokens=11, experts=4, dtype=dtype)
    assert_same_bits(run_split(p, (6, 5)), run(p), only=ROUTED)
    theirs = gradients(p.x, p.ids, p.topk_weights, p.weights, p.d_y)
    for (name, a), (_, b) in zip(flat(run_split(p, (4, 7))), flat(theirs), strict=True):
        assert error(a, b) < TOLERANCE[dtype], name


def test_no_option_changes_a_bit():
    p = problem(3, tokens=40, hidden=64, inner=32, experts=4, topk=2, dtype=torch.bfloat16)
    want = run(p)
    for options in (
        mok.Options(saved_rows=0, comm_workers=2),
        mok.Options(ring_rows=128, minibatch_rows=128, compute_workers=3),
        mok.Options(delay_seed=7),
    ):
        assert_same_bits(run_split(p, (25, 15), options), want, only=ROUTED)


def step(rank, placement, seed):
    """One SGD step of a layer whose replicated gradients are averaged; the router's new weights."""
    torch.manual_seed(seed)
    group = mok.default_group()
    layer = mok.MoELayer(32, 16, 8, 2, dtype=torch.float32)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(seed))  # of both ranks
    mine = x[rank] if group.ranks == 2 else x.flatten(0, 1)
    ids, weights, _ = mok.route(layer.router_logits(mine), 2)
    if placement == "before":  # the weight applied to the input's copy of the output, by hand
        ones = torch.ones_like(weights)
        slots = [
            layer(mine, topk_ids=ids[:, k : k + 1], topk_weights=ones[:, :1]) for k in range(2)
        ]
        y = sum(weights[:, k : k + 1] * slots[k] for k in range(2))
    else:
        y = layer(mine, topk_ids=ids, topk_weights=weights)
    # The mean over all tokens of all ranks.
    (y.square().sum() / (2 * 6)).backward()
    gradient = layer.router_weight.grad
    if group.ranks == 2:
        dist.all_reduce(gradient)
    torch.optim.SGD([layer.router_weight], lr=0.1).step()
    return gradient, layer.router_weight.detach(), layer.w_gate.grad


@pytest.mark.parametrize("placement", ["after", "before"])
def test_G2_G3_router_gradient_is_complete_and_copies_stay_equal(placement):
    mok.init()
    alone = step(0, placement, 5)
    first, second = ranks.run(2, step, placement, 5)
    assert same_bits(first[1], second[1])  # G3
    torch.testing.assert_close(first[0], alone[0])  # G2
    # E1: expert gradients are not R times too big.
    torch.testing.assert_close(torch.cat([first[2], second[2]]), alone[2])


def test_Z3_a_rank_that_receives_nothing_takes_part_in_backward():
    p = problem(6, tokens=16, experts=4, topk=1, dropped=0, dtype=torch.bfloat16)
    p.ids %= 2  # all on rank 0
    begin = time.monotonic()
    together = run_split(p, (8, 8))
    assert time.monotonic() - begin < 30
    assert_same_bits(together, run(p), only=ROUTED)
    assert not together[3].gate[2:].any()


class Cut(torch.autograd.Function):
    """Passes the value on and no gradient at all back."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, d):
        return None


def cut_off(rank, p, splits):
    mine = part(p, rank, splits)
    tensors = leaves(mine)
    y = mok.moe(tensors[0], mine.ids, tensors[1], *tensors[2:])
    (Cut.apply(y) if rank == 1 else y).backward(mine.d_y)
    return tensors[0].grad, tensors[4].grad


def test_Z3_a_rank_whose_loss_sends_no_gradient_takes_part_in_backward():
    p = problem(18, tokens=8, experts=4, dtype=torch.bfloat16)
    first, second = ranks.run(2, cut_off, p, (4, 4), timeout=30)
    p.d_y[4:] = 0
    want = run(p)
    assert same_bits(torch.cat([first[0], second[0]]), want[1])
    assert same_bits(torch.cat([first[1], second[1]]), want[3].down)


def repeat(rank, problems_, splits_):
    return [run(part(p, rank, s)) for p, s in zip(problems_, splits_, strict=True)]


def test_Z5_U1_U3_ranks_with_few_or_no_tokens():
    """[0,5], [5,0], [0,0] twice; then T that grows and shrinks, with fewer tokens than ranks."""
    splits = [
        (0, 5),
        (5, 0),
        (0, 0),
        (0, 5),
        (0, 0),
        (7, 7),
        (7, 300),
        (300, 7),
        (0, 300),
        (1, 0),
        (1, 1),
    ]
    ps = [problem(7, tokens=sum(s), experts=4, shared=3, dtype=torch.bfloat16) for s in splits]
    results = ranks.run(2, repeat, ps, splits, max_tokens=300)
    for i, p in enumerate(ps):
        together = whole([r[i] for r in results])
        assert_same_bits(together, run(p), only=ROUTED)


def test_U3_fewer_tokens_than_ranks():
    splits = [(1, 0, 0, 0), (0, 1, 0, 1), (2, 1, 0, 0), (2, 1, 1, 1)]
    ps = [problem(8, tokens=sum(s), experts=4, dtype=torch.bfloat16) for s in splits]
    results = ranks.run(4, repeat, ps, splits, max_tokens=2)
    for i, p in enumerate(ps):
        assert_same_bits(whole([r[i] for r in results]), run(p), only=ROUTED)


def grow(rank, p, splits):
    mine = part(p, rank, splits)
    group = mok.default_group()
    try:
        run(mine)
        first = "fine"
    except (ValueError, RuntimeError) as e:
        first = f"{type(e).__name__}: {e}"
    mok.reserve(len(mine.x))  # the largest counts
    return first, group.max_tokens, run(mine)


def test_U1_growth_is_decided_together():
    p = problem(9, tokens=30, experts=4, dtype=torch.bfloat16)
    small, large = ranks.run(2, grow, p, (5, 25), max_tokens=8)
    assert large[0].startswith("ValueError: x: 25 tokens, but max_tokens is 8")
    # The peer learns of it at once, not after its deadline.
    assert small[0].startswith("RuntimeError") and "rank 1" in small[0]
    assert small[1] == large[1] == 25
    assert_same_bits(whole([small[2], large[2]]), run(p), only=ROUTED)


def micro_batches(rank, ps, splits, order):
    mine = [part(p, rank, s) for p, s in zip(ps, splits, strict=True)]
    tensors = [leaves(p) for p in mine]
    ys = [mok.moe(t[0], p.ids, t[1], *t[2:]) for p, t in zip(mine, tensors, strict=True)]
    for i in order:
        ys[i].backward(mine[i].d_y)
    grads = [[None if t is None else t.grad for t in each] for each in tensors]
    return [(y.detach(), g[0], g[1], Weights(*g[2:])) for y, g in zip(ys, grads, strict=True)]


def test_micro_batches_in_flight_over_two_ranks():
    splits = [(6, 4), (0, 9), (5, 5)]
    ps = [
        problem(10 + i, tokens=sum(s), experts=4, dtype=torch.bfloat16)
        for i, s in enumerate(splits)
    ]
    results = ranks.run(2, micro_batches, ps, splits, (2, 0, 1))
    for i, p in enumerate(ps):
        assert_same_bits(whole([r[i] for r in results]), run(p), only=ROUTED)


def bad_then_good(rank, p, splits, bad):
    mine = part(p, rank, splits)
    want = run(mine)
    kept = mine.ids.clone(), mine.x
    if rank == 1:
        if bad == "id":
            mine.ids[2, 1] = 99
        elif bad == "dtype":
            mine.x = mine.x.float()
        else:
            mine.topk_weights = mine.topk_weights[:, :1]
    begin = time.monotonic()
    try:
        run(mine)
        raise AssertionError("no error")
    except (ValueError, TypeError, RuntimeError) as e:
        found = type(e).__name__, str(e)
    waited = time.monotonic() - begin
    mine.ids, mine.x = kept
    mine.topk_weights = part(p, rank, splits).topk_weights
    assert_same_bits(run(mine), want)
    return found, waited


@pytest.mark.parametrize("bad", ["id", "dtype", "shape"])
def test_bad_input_on_one_rank_raises_on_both_and_the_next_call_works(bad):
    p = problem(11, tokens=12, experts=4, dtype=torch.bfloat16)
    first, second = ranks.run(2, bad_then_good, p, (6, 6), bad)
    assert second[0][0] == ("TypeError" if bad == "dtype" else "ValueError")
    assert {"id": "topk_ids", "dtype": "x: dtype", "shape": "topk_weights"}[bad] in second[0][1]
    assert "rank 1" in first[0][1], first
    assert first[1] < 15 and second[1] < 15


def disagree(rank, p, splits):
    mine = part(p, rank, splits)
    run(mine)
    tensors = leaves(mine)
    tensors[2].requires_grad_(rank == 0)  # which gradients are wanted differs
    try:
        mok.moe(tensors[0], mine.ids, tensors[1], *tensors[2:]).backward(mine.d_y)
        return "fine"
    except (ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"


def test_ranks_that_want_different_gradients_raise():
    p = problem(12, tokens=8, experts=4, dtype=torch.bfloat16)
    for message in ranks.run(2, disagree, p, (4, 4)):
        assert message.startswith("ValueError: mok [ranks disagree]"), message


def die(rank, p, splits):
    mine = part(p, rank, splits)
    run(mine)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        run(mine)
        return "fine", 0.0
    except RuntimeError as e:
        return str(e), time.monotonic() - begin


def test_H2_a_killed_rank_is_named():
    p = problem(13, tokens=8, experts=4, dtype=torch.bfloat16)
    os.environ["MOK_TEST_NO_DESTROY"] = "1"
    try:
        started = ranks.start(
            2,
            die,
            p,
            (4, 4),
            settings={"max_tokens": 8, "arrival_timeout": 5, "progress_timeout": 5},
        )
    finally:
        del os.environ["MOK_TEST_NO_DESTROY"]
    (good, (message, waited)), _ = ranks.collect(started, timeout=60, may_die=(1,))
    assert good and "rank 1" in message and waited < 12, (message, waited)


def late(rank, p, splits):
    mine = part(p, rank, splits)
    run(mine)
    if rank == 1:
        time.sleep(4)
    messages = []
    try:
        run(mine)
        messages.append("fine")
    except RuntimeError as e:
        messages.append(str(e))
    dist.barrier()
    return messages, run(mine)


def test_H1_a_late_rank_is_named_and_the_next_call_works():
    p = problem(14, tokens=8, experts=4, dtype=torch.bfloat16)
    first, second = ranks.run(2, late, p, (4, 4), arrival_timeout=1.5, progress_timeout=20)
    assert "rank 1" in first[0][0] and "deadline" in first[0][0], first[0]
    assert_same_bits(whole([first[1], second[1]]), run(p), only=ROUTED)


def leave_early(rank, p, splits):
    run(part(p, rank, splits))
    if rank == 0:
        time.sleep(1)
    return True


def test_B9_a_rank_may_exit_before_the_others():
    p = problem(15, tokens=8, experts=4, dtype=torch.bfloat16)
    begin = time.monotonic()
    assert ranks.run(2, leave_early, p, (4, 4)) == [True, True]
    assert time.monotonic() - begin < 30


def settings_differ(rank, which):
    message = "fine"
    try:
        if which == "options":
            mok.init(max_tokens=4, options=mok.Options(ring_rows=128 * rank))
        elif which == "bad":
            mok.init(max_tokens="a" if rank else 4)
        elif which == "bad reserve":
            group = mok.new_group(max_tokens=4)
            group.reserve(4 if rank else -1)
        elif which == "max_tokens":
            message = str(mok.init(max_tokens=4 + rank).max_tokens)
        elif which == "none":
            mok.init()
        elif which == "experts":
            mok.init(max_tokens=4)
            mok.MoELayer(8, 4, 3, 1)
        else:
            mok.MoELayer(8, 4, 2, 1)
    except (TypeError, ValueError, RuntimeError) as e:
        message = f"{type(e).__name__}: {e}"
    return message


def start_without_init(which):
    return [v[1] for v in ranks.collect(ranks.start(2, settings_differ, which))]


def test_set_up_is_agreed_by_all_ranks():
    assert start_without_init("max_tokens") == ["5", "5"]
    assert start_without_init("bad") == [
        "ValueError: max_tokens: 'a' is not an integer (on rank 1)",
        "TypeError: max_tokens: 'a' is not an integer",
    ]
    assert start_without_init("bad reserve") == [
        "ValueError: max_tokens: -1 is negative",
        "ValueError: max_tokens: -1 is negative (on rank 0)",
    ]
    for which, text in (
        ("options", "ValueError: options"),
        ("none", "ValueError: max_tokens: needed"),
        ("experts", "ValueError: experts: 3 is not a multiple of the group's 2 ranks"),  # S10
        ("default", "RuntimeError: mok.init"),
    ):
        for message in start_without_init(which):
            assert message.startswith(text), message


def two_groups(rank, p, splits):
    """An EP group per pair of ranks, data parallel across."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = mok.new_group(pairs[rank // 2], max_tokens=16)
    assert (group.rank, group.ranks) == (rank % 2, 2)
    return run(part(p, rank % 2, splits), group)


def test_two_groups_side_by_side():
    p = problem(16, tokens=10, experts=4, dtype=torch.bfloat16)
    results = ranks.run(4, two_groups, p, (6, 4))
    assert_same_bits(whole(results[:2]), run(p), only=ROUTED)
    assert_same_bits(whole(results[2:]), run(p), only=ROUTED)


def initial_values(rank, layout):
    torch.manual_seed(77)
    layer = mok.MoELayer(16, 8, 4, 2, shared_intermediate=6, layout=layout)
    return {n: p.detach() for n, p in layer.named_parameters()}


@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_initial_values_do_not_depend_on_the_number_of_ranks(layout):
    mok.init()
    alone = initial_values(0, layout)
    parts = ranks.run(2, initial_values, layout)
    for name, value in alone.items():
        local = name in ("w_gate", "w_up", "w_gate_up", "w_down")
        if local:
            assert same_bits(torch.cat([each[name] for each in parts]), value), name
        else:
            assert all(same_bits(each[name], value) for each in parts), name


# ---- with PyTorch's own parallelism ----------------------------------------------------------


def sharded_weights(rank, p, splits):
    return run_sharded(part(p, rank, splits), 2)


def test_F1_local_shards_of_dtensors():
    p = problem(17, tokens=10, experts=4, dtype=torch.bfloat16)
    results = ranks.run(2, sharded_weights, p, (6, 4))
    assert_same_bits(whole(results), run(p), only=ROUTED)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner = torch.nn.Linear(16, 16)
        self.moe = mok.MoELayer(16, 8, 4, 2, shared_intermediate=6)

    def forward(self, x):
        return self.moe(torch.tanh(self.inner(x)))


def fully_sharded(rank, compile_it):
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(rank))
    return check_fully_sharded(Net, x, compile_it)


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_K3_fully_shard_around_the_layer(compile_it):
    assert ranks.run(2, fully_sharded, compile_it, timeout=120) == [True, True]


def data_parallel(rank):
    from torch.nn.parallel import DistributedDataParallel

    net = Net()
    leave_experts_to_their_ranks(net)
    ddp = DistributedDataParallel(net)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(rank))
    ddp(x).square().sum().backward()
    return net.inner.weight.grad, net.moe.router_weight.grad, net.moe.w_gate.grad


def test_ddp_around_the_layer():
    first, second = ranks.run(2, data_parallel)
    assert same_bits(first[0], second[0]) and same_bits(first[1], second[1])
    assert not same_bits(first[2], second[2])  # other experts
