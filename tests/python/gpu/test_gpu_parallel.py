"""Two processes with a GPU each: the same bits as one, errors, PyTorch's own parallelism."""

import time

import mok
import pytest
import torch
import torch.distributed as dist
from gpu_problems import gpu_problem, moved, overwrite
from modules import check_fully_sharded, leave_experts_to_their_ranks
from problems import (
    TOLERANCE,
    assert_same_bits,
    flat,
    leaves,
    part,
    run,
    run_sharded,
    same_bits,
    whole,
)

from reference import Weights, error

ROUTED = ("y", "d_x", "d_topk_weights", "d_gate", "d_up", "d_down")


def here(rank):
    return torch.device("cuda", rank)


def mine(p, rank, splits):
    return moved(part(p, rank, splits), here(rank))


def repeat(rank, problems_, splits_, precision):
    results = [
        run(mine(p, rank, s), precision=precision) for p, s in zip(problems_, splits_, strict=True)
    ]
    mok.synchronize()
    return moved(results, "cpu")


@pytest.mark.parametrize("precision", [None, "mxfp8", "fp8"])
def test_same_bits_as_one_rank_with_any_number_of_tokens(two, precision):
    splits = [(10, 27), (0, 37), (37, 0), (300, 212), (0, 0), (1, 0)]
    ps = [
        gpu_problem(30 + i, "cpu", tokens=sum(s), shared=64, shared_gate=True)
        for i, s in enumerate(splits)
    ]
    results = two.run(repeat, ps, splits, precision, max_tokens=300)
    for i, p in enumerate(ps):
        together = whole([r[i] for r in results])
        alone = moved(run(moved(p, here(0)), precision=precision), "cpu")
        assert_same_bits(together, alone, only=ROUTED)
        for (name, a), (_, b) in zip(flat(together)[6:], flat(alone)[6:], strict=True):
            assert error(a, b) < TOLERANCE[torch.bfloat16], name


def shared_by_layers(rank):
    layers = [
        mok.MoELayer(128, 64, 8, 2, dtype=torch.bfloat16, device=here(rank)) for _ in range(3)
    ]
    x = torch.randn(20, 128, dtype=torch.bfloat16, device=here(rank))
    sizes = []
    for layer in layers:
        x = layer(x)
        sizes.append(mok.default_group().memory_bytes())
    return sizes


def test_layers_of_one_shape_share_their_memory(two):
    for sizes in two.run(shared_by_layers):
        assert sizes[0] > 0 and sizes == [sizes[0]] * 3


def grow(rank, p, splits):
    own = mine(p, rank, splits)
    group = mok.default_group()
    try:
        run(own)
        mok.synchronize()
        first = "fine"
    except (ValueError, RuntimeError) as e:
        first = f"{type(e).__name__}: {e}"
    mok.reserve(len(own.x))
    return first, group.max_tokens, moved(run(own), "cpu")


def test_growth_is_decided_together(two):
    p = gpu_problem(36, "cpu", tokens=100)
    small, large = two.run(grow, p, (20, 80), max_tokens=30)
    assert large[0].startswith("ValueError: x: 80 tokens, but max_tokens is 30")
    assert small[0].startswith("RuntimeError") and "rank 1" in small[0]
    assert small[1] == large[1] == 80
    assert_same_bits(whole([small[2], large[2]]), moved(run(moved(p, here(0))), "cpu"), only=ROUTED)


# ---- errors ----------------------------------------------------------------------------------


def bad_then_good(rank, p, splits, bad):
    own = mine(p, rank, splits)
    want = run(own)
    mok.synchronize()
    kept = own.ids.clone(), own.x, own.topk_weights
    if rank == 1:
        if bad == "id":
            own.ids[2, 1] = 2**40 + 5
        elif bad == "dtype":
            own.x = own.x.float()
        else:
            own.topk_weights = own.topk_weights[:, :1]
    begin = time.monotonic()
    try:
        run(own)
        mok.synchronize()
        raise AssertionError("no error")
    except (ValueError, TypeError, RuntimeError) as e:
        found = type(e).__name__, str(e)
    waited = time.monotonic() - begin
    own.ids, own.x, own.topk_weights = kept
    for _ in range(3):
        assert_same_bits(run(own), want)
    mok.synchronize()
    return found, waited


@pytest.mark.parametrize("bad", ["id", "dtype", "shape"])
def test_bad_input_on_one_rank_raises_on_both_and_the_next_call_works(two, bad):
    p = gpu_problem(37, "cpu", tokens=60)
    first, second = two.run(bad_then_good, p, (30, 30), bad)
    assert second[0][0] == ("TypeError" if bad == "dtype" else "ValueError")
    names = {"id": f"slot 1: id {2**40 + 5} is", "dtype": "x: dtype", "shape": "topk_weights"}
    assert names[bad] in second[0][1], second
    assert bad != "id" or names["id"] in first[0][1], first
    assert "rank 1" in first[0][1], first
    assert first[1] < 10 and second[1] < 10


def disagree(rank, p, splits):
    own = mine(p, rank, splits)
    want = run(own)
    tensors = leaves(own)
    tensors[2].requires_grad_(rank == 0)  # which gradients are wanted differs
    try:
        mok.moe(tensors[0], own.ids, tensors[1], *tensors[2:]).backward(own.d_y)
        mok.synchronize()
        message = "fine"
    except (ValueError, RuntimeError) as e:
        message = f"{type(e).__name__}: {e}"
    assert_same_bits(run(own), want)
    return message


def test_ranks_that_want_different_gradients_raise(two):
    messages = two.run(disagree, gpu_problem(38, "cpu"), (17, 20))
    assert any(m.startswith("ValueError: mok: ranks disagree") or "different calls" in m
               for m in messages), messages  # fmt: skip
    assert "fine" not in messages, messages


def late(rank, p, splits):
    own = mine(p, rank, splits)
    want = run(own)
    mok.synchronize()
    if rank == 1:
        time.sleep(4)
    messages = []
    while True:  # rank 0 does not get further before rank 1 has come
        try:
            got = run(own)
            mok.synchronize()
            break
        except (RuntimeError, ValueError) as e:
            messages.append(str(e))
    assert_same_bits(got, want)
    return messages


def test_a_late_rank_is_named_and_calls_work_when_it_has_come(two):
    p = gpu_problem(39, "cpu")
    first, second = two.run(late, p, (17, 20), arrival_timeout=1.5, progress_timeout=10)
    assert "waited too long" in first[0] and "rank 1" in first[0], first
    assert len(first) >= 2 and "rank 1 to make its next call after an error" in first[1], first
    # Rank 0 was in its backward when rank 1 came to its forward: that is not what went wrong.
    assert len(second) == 1 and "because rank 0 gave it up" in second[0], second


# ---- the published interface -----------------------------------------------------------------


def published(rank, p, splits):
    from mok import functional

    own = mine(p, rank, splits)
    w, config = own.weights.each(), functional.MoKConfig()
    workspace = functional.get_workspace(
        config, dist.group.WORLD, device=here(rank), num_local_tokens=len(own.x), hidden_size=128,
        topk=3,
    )  # fmt: skip
    schedule = functional.build_schedule(workspace, config, own.ids, num_local_experts=4)
    arguments = (own.x, own.topk_weights, *w[3:6], *w[:3])
    y, context = functional.forward(config, workspace, schedule, *arguments)
    grads = functional.backward(config, workspace, schedule, context, own.d_y, *arguments)
    mok.synchronize()
    functional.clear_workspace_cache()
    return moved((y, *grads[:2], Weights(*grads[2:])), "cpu"), moved(
        (schedule.peer_rank, schedule.tokens_per_expert), "cpu"
    )


def test_functional_over_two_ranks(two):
    p = gpu_problem(44, "cpu", tokens=90, shared=64)
    results = two.run(published, p, (31, 59))
    assert_same_bits(
        whole([r for r, _ in results]), moved(run(moved(p, here(0))), "cpu"), only=ROUTED
    )
    for rank, (_, (peer_rank, tokens_per_expert)) in enumerate(results):
        rows = torch.stack([(p.ids[:31] == e).sum() + (p.ids[31:] == e).sum()
                            for e in range(4 * rank, 4 * rank + 4)])  # fmt: skip
        assert (peer_rank >= 0).sum() == rows.sum()
        assert (tokens_per_expert >= rows).all()


# ---- graphs ----------------------------------------------------------------------------------


def graphed(rank, ps, splits):
    own = [mine(p, rank, splits) for p in ps]
    want = [run(p) for p in own]
    static = mine(ps[0], rank, splits)
    tensors = leaves(static)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mok.moe(tensors[0], static.ids, tensors[1], *tensors[2:]).backward(static.d_y)
    stream.synchronize()
    for t in tensors:
        if t is not None:
            t.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mok.moe(tensors[0], static.ids, tensors[1], *tensors[2:])
        y.backward(static.d_y)
    for i in (1, 0, 1, 1):
        overwrite(static, tensors, own[i])
        graph.replay()
        grads = [None if t is None else t.grad for t in tensors]
        assert_same_bits((y, grads[0], grads[1], Weights(*grads[2:])), want[i])
        assert_same_bits(run(own[i]), want[i])
    torch.cuda.synchronize()
    return True


def test_graphs_of_two_ranks(two):
    ps = [gpu_problem(40 + i, "cpu", tokens=120) for i in range(2)]
    assert two.run(graphed, ps, (70, 50), max_tokens=70) == [True, True]


# ---- with PyTorch's own parallelism ----------------------------------------------------------


def sharded_weights(rank, p, splits):
    return moved(run_sharded(mine(p, rank, splits), 2), "cpu")


def test_local_shards_of_dtensors(two):
    p = gpu_problem(42, "cpu")
    results = two.run(sharded_weights, p, (17, 20))
    assert_same_bits(whole(results), moved(run(moved(p, here(0))), "cpu"), only=ROUTED)


class Net(torch.nn.Module):
    def __init__(self, device, group=None):
        super().__init__()
        torch.manual_seed(3)
        self.inner = torch.nn.Linear(128, 128, device=device)
        self.moe = mok.MoELayer(128, 64, 8, 2, shared_intermediate=64, device=device,
                                compute_dtype=torch.bfloat16, group=group)  # fmt: skip

    def forward(self, x):
        return self.moe(torch.tanh(self.inner(x))).float()


def inputs(rank):
    return torch.randn(25, 128, generator=torch.Generator().manual_seed(rank)).to(here(rank))


def fully_sharded(rank, compile_it):
    return check_fully_sharded(lambda: Net(here(rank)), inputs(rank), compile_it)


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_fully_shard_around_the_layer(two, compile_it):
    assert two.run(fully_sharded, compile_it, timeout=120) == [True, True]


def data_parallel(rank, across):
    from torch.nn.parallel import DistributedDataParallel

    # Across: every rank has all experts, and DDP averages them, too.
    net = Net(here(rank), mok.local_group() if across else None)
    if not across:
        leave_experts_to_their_ranks(net)
    ddp = DistributedDataParallel(net, device_ids=[rank])
    ddp(inputs(rank)).square().sum().backward()
    return moved((net.inner.weight.grad, net.moe.router_weight.grad, net.moe.w_gate.grad), "cpu")


@pytest.mark.parametrize("across", [False, True], ids=["experts apart", "experts replicated"])
def test_ddp_around_the_layer(two, across):
    first, second = two.run(data_parallel, across)
    assert same_bits(first[0], second[0]) and same_bits(first[1], second[1])
    assert same_bits(first[2], second[2]) == across


def saves(rank, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    net = Net(here(rank))
    mesh = init_device_mesh("cuda", (2,))
    local = {id(p) for p in net.moe.expert_parameters()}
    state = {
        name: DTensor.from_local(p.detach(), mesh, [Shard(0)]) if id(p) in local else p.detach()
        for name, p in net.named_parameters()
    }
    dcp.save(state, checkpoint_id=folder)
    return net(inputs(rank)).detach().cpu()


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(two, tmp_path):
    import torch.distributed.checkpoint as dcp

    want = two.run(saves, str(tmp_path))
    net = Net(here(0))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(torch.nan)
    dcp.load(
        {n: p.detach() for n, p in net.named_parameters()},
        checkpoint_id=str(tmp_path),
        no_dist=True,
    )
    y = net(torch.cat([inputs(0), inputs(1).to(here(0))]))
    # The dense layer before it may differ in its last bits with the number of rows.
    torch.testing.assert_close(y.cpu(), torch.cat(want), rtol=2e-2, atol=2e-2)


# ---- set-up ----------------------------------------------------------------------------------


def shapes_differ(rank):
    layer = mok.MoELayer(128, 64 * (1 + rank), 8, 2, dtype=torch.bfloat16, device=here(rank))
    try:
        layer(torch.zeros(4, 128, dtype=torch.bfloat16, device=here(rank)))
        return "fine"
    except ValueError as e:
        return str(e)


def test_set_up_is_checked(two):
    for message in two.run(shapes_differ):
        assert message == "intermediate: 128 on rank 1, but 64 on rank 0"
