"""One process, one GPU: values, bits, streams, errors."""

import mok
import pytest
import torch
from gpu_problems import DEVICE, gpu_problem, moved
from problems import TOLERANCE, assert_same_bits, flat, leaves, run, same_bits

from reference import error, gradients

TOLERATED = TOLERANCE[torch.bfloat16]

CASES = {
    "plain": {},
    "one token": {"tokens": 1, "dropped": 0},
    "many tiles": {"tokens": 900, "experts": 4, "hidden": 192, "inner": 320},
    "shared": {"shared": 128},
    "gated shared, limit": {"shared": 64, "shared_gate": True, "limit": 0.75},
    "nearly all dropped": {"dropped": 0.97},
}


@pytest.mark.parametrize("case", CASES)
def test_the_values_are_those_of_the_contract_and_of_the_cpu(case):
    p = gpu_problem(1, **CASES[case])
    result = moved(run(p), "cpu")
    host = moved(p, "cpu")
    oracle = gradients(
        host.x, host.ids, host.topk_weights, host.weights, host.d_y, host.limit, rounding=True
    )
    for other in (oracle, run(host)):
        for (name, a), (_, b) in zip(flat(result), flat(other), strict=True):
            assert error(a, b) < TOLERATED, name


def test_no_tokens():
    p = gpu_problem(2, tokens=0)
    y, d_x, d_topk_weights, w = run(p)
    assert y.shape == d_x.shape == (0, 128) and d_topk_weights.shape == (0, 3)
    assert not any(t.any() for t in w.each()[:3])


def test_same_bits_every_time_with_any_option_and_ids_of_32_bits():
    p = gpu_problem(3, tokens=500, shared=64, shared_gate=True)
    want = run(p)
    for options in (None, mok.Options(saved_rows=0), mok.Options(ring_rows=256, minibatch_rows=128),
                    mok.Options(sm_reserve=64, comm_blocks=8)):  # fmt: skip
        group = mok.new_group(options=options)
        for _ in range(3):
            assert_same_bits(run(p, group), want)
        group.close()
    p.ids = p.ids.int()
    assert_same_bits(run(p), want)


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
def test_layouts_change_no_bit(layout):
    p = gpu_problem(4)
    want = run(p)
    x, topk_weights, gate, up, down, *_ = leaves(p)
    both = (
        torch.cat([gate, up], 1)
        if layout == "stacked"
        else torch.stack([gate, up], 2).flatten(1, 2)
    )
    both = both.detach().requires_grad_()
    y = mok.moe(x, p.ids, topk_weights, both, None, down, layout=layout)
    y.backward(p.d_y)
    assert same_bits(y, want[0]) and same_bits(x.grad, want[1])
    d = both.grad
    parts = d.chunk(2, 1) if layout == "stacked" else (d[:, 0::2], d[:, 1::2])
    assert same_bits(parts[0], want[3].gate) and same_bits(parts[1], want[3].up)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2, 3), (4,), (0, 1, 4)], ids=str)
def test_only_what_requires_a_gradient_gets_one(wanted):
    p = gpu_problem(5)
    want = [t for _, t in flat(run(p))][1:]
    tensors = leaves(p)
    for i, t in enumerate(tensors[:5]):
        t.requires_grad_(i in wanted)
    mok.moe(tensors[0], p.ids, tensors[1], *tensors[2:]).backward(p.d_y)
    for i, t in enumerate(tensors[:5]):
        assert (t.grad is not None) == (i in wanted)
        assert t.grad is None or same_bits(t.grad, want[i])


def test_views_and_expanded_gradients():
    p = gpu_problem(6)
    want = run(p)
    wide = torch.zeros(37, 256, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 64:192] = p.x
    p.x = wide[:, 64:192]
    p.ids = p.ids.t().contiguous().t()
    assert_same_bits(run(p), want)
    x = p.x.detach().requires_grad_()
    mok.moe(x, p.ids, p.topk_weights, *p.weights.each()).sum().backward()
    p.d_y = torch.ones_like(p.d_y)
    assert same_bits(x.grad, run(p)[1])


# ---- streams ---------------------------------------------------------------------------------


def test_the_current_stream_is_used():
    """x is written late on a side stream; no other stream would see it."""
    p = gpu_problem(7)
    want = run(p)
    stream = torch.cuda.Stream()
    for _ in range(3):
        x = torch.zeros_like(p.x).requires_grad_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            x.data.copy_(p.x)
            y = mok.moe(x, p.ids, p.topk_weights, *p.weights.each())
            y.backward(p.d_y)
            got = y.detach().clone(), x.grad.clone()
        stream.synchronize()
        assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])


def test_calls_on_two_streams_do_not_race():
    ps = [gpu_problem(8 + i, tokens=300) for i in range(2)]
    want = [run(p) for p in ps]
    streams = [torch.cuda.Stream() for _ in ps]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for p, stream in zip(ps, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run(p))
        torch.cuda.synchronize()
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


def test_the_host_does_not_wait():
    p = gpu_problem(9)
    run(p)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    done = torch.cuda.Event()
    run(p)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


# ---- errors ----------------------------------------------------------------------------------


def test_what_does_not_fit_is_named():
    p = gpu_problem(10)
    w = p.weights.each()
    good = {"x": p.x, "topk_ids": p.ids, "topk_weights": p.topk_weights,
            "w_gate": w[0], "w_up": w[1], "w_down": w[2]}  # fmt: skip

    def refused(kind, text, **change):
        with pytest.raises(kind) as caught:
            mok.moe(**{**good, **change})
        assert text in str(caught.value), caught.value

    mok.moe(**good)
    for _ in range(2):  # the second time the sizes are known
        refused(ValueError, "x: on cpu", x=p.x.cpu())
        refused(ValueError, "topk_ids: on cpu", topk_ids=p.ids.cpu())
        refused(ValueError, "w_gate: on cpu", w_gate=w[0].cpu())
        refused(TypeError, "x: dtype torch.float32", x=p.x.float())
        refused(
            TypeError, "topk_weights: dtype torch.bfloat16", topk_weights=p.topk_weights.bfloat16()
        )
        refused(ValueError, "topk_weights: shape", topk_weights=p.topk_weights[:, :2])
        refused(ValueError, "w_up: shape", w_up=w[1][:, :32])
        refused(ValueError, "16 bytes", x=torch.empty(37 * 128 + 1, dtype=torch.bfloat16,
                                                     device=DEVICE)[1:].view(37, 128))  # fmt: skip
    with pytest.raises(TypeError, match=r"w_down: dtype torch\.float32"):
        mok.moe(p.x.float(), p.ids, p.topk_weights, *(t.float() for t in w[:3]))
    odd = gpu_problem(10, hidden=100)
    with pytest.raises(ValueError, match="hidden must be a multiple of 64"):
        run(odd)
    layer = mok.MoELayer(128, 64, 8, 3, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="x: on cpu"):
        layer(torch.zeros(2, 128, dtype=torch.bfloat16))
    assert_same_bits(run(p), run(p))


def test_a_bad_id_is_found_on_the_device_and_the_next_call_works():
    p = gpu_problem(11)
    want = run(p)
    good = p.ids.clone()
    main_grads = [torch.ones(t.shape, device=DEVICE) for t in p.weights.each()[:3]]
    for how in ("synchronize", "next call"):
        p.ids[5, 1] = 8
        tensors = leaves(p)
        for t, main_grad in zip(tensors[2:5], main_grads, strict=True):
            t.main_grad = main_grad
        y = mok.moe(tensors[0], p.ids, tensors[1], *tensors[2:], accumulate=True)
        assert y.isnan().all()
        with pytest.raises(ValueError, match=r"rank 0, token 5, slot 1: id 8 is outside"):
            if how == "synchronize":
                mok.synchronize()
            else:
                y.backward(p.d_y)
        assert all((m == 1).all() for m in main_grads)
        p.ids.copy_(good)
        assert_same_bits(run(p), want)
        mok.synchronize()


@pytest.mark.parametrize("bad", [2**40 + 5, -(2**35), -(2**31), 2**31])
def test_an_id_beyond_32_bits_is_named(bad):
    p = gpu_problem(14)
    want = run(p)
    good = p.ids.clone()
    p.ids[7, 2] = bad
    p.ids[9, 0] = -(2**50)  # a later one is not named
    mok.moe(p.x, p.ids, p.topk_weights, *p.weights.each())
    with pytest.raises(ValueError, match=rf"token 7, slot 2: id {bad} is outside"):
        mok.synchronize()
    p.ids = good.int()
    assert_same_bits(run(p), want)
    p.ids[7, 2] = -(2**31)
    mok.moe(p.x, p.ids, p.topk_weights, *p.weights.each())
    with pytest.raises(ValueError, match=rf"token 7, slot 2: id {-(2**31)} is outside"):
        mok.synchronize()


def test_no_second_derivative():
    p = gpu_problem(12)
    x = p.x.detach().requires_grad_()
    y = mok.moe(x, p.ids, p.topk_weights, *p.weights.each())
    (d_x,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        d_x.sum().backward()


# ---- the published interface -----------------------------------------------------------------


def test_functional_gives_the_bits_of_moe():
    from mok import functional as F

    p = gpu_problem(13, shared=64)
    want = run(p)
    config = F.MoKConfig()
    w = p.weights.each()
    workspace = F.get_workspace(
        config, None, device="cuda", num_local_tokens=37, hidden_size=128, topk=3
    )
    schedule = F.build_schedule(workspace, config, p.ids, num_local_experts=8)
    on_cpu = F.create_workspace(
        config, None, device="cpu", num_local_tokens=37, hidden_size=128, topk=3
    )
    host = F.build_schedule(on_cpu, config, p.ids.cpu(), num_local_experts=8)
    for name in ("peer_rank", "peer_token_idx", "num_tokens", "tokens_per_expert"):
        assert torch.equal(getattr(schedule, name).cpu(), getattr(host, name)), name
    arguments = (p.x, p.topk_weights, *w[3:6], *w[:3])
    y, context = F.forward(config, workspace, schedule, *arguments)
    assert same_bits(y, want[0])
    again = F.recompute_forward_context(config, workspace, schedule, p.x, *w[3:5], *w[:2])
    for kept in (context, again):
        grads = F.backward(config, workspace, schedule, kept, p.d_y, *arguments)
        expected = (want[1], want[2], *want[3].each()[:6])
        for got, other in zip(grads, expected, strict=True):
            assert same_bits(got, other)
    with pytest.raises(ValueError, match="x: on cpu, the workspace is on cuda:0"):
        F.forward(config, workspace, schedule, p.x.cpu(), *arguments[1:])
    with pytest.raises(ValueError, match=r"routed_gate_weights: dtype torch\.float32, expected"):
        F.forward(config, workspace, schedule, p.x, p.topk_weights, None, None, None,
                  *(t.float() for t in w[:3]))  # fmt: skip
    F.clear_workspace_cache()
