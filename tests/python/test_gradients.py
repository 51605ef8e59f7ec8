"""Which gradients arrive, where, and that they are right: needs, main_grad, micro-batches."""

import gc
import itertools
import weakref

import mok
import pytest
import torch
from problems import assert_same_bits, flat, leaves, problem, run, same_bits

import reference


def call(p, tensors, **settings):
    return mok.moe(tensors[0], p.ids, tensors[1], *tensors[2:], swiglu_limit=p.limit, **settings)


@pytest.mark.parametrize("layout", ["split", "stacked", "interleaved"])
def test_gradcheck_fp64(layout):
    p = problem(1, tokens=5, hidden=6, inner=4, experts=3, shared=3, shared_gate=True, limit=0.75)
    tensors = leaves(p)
    if layout != "split":
        tensors[2], tensors[3] = fused(tensors[2], tensors[3], layout), None
    given = [t for t in tensors if t is not None]

    def function(*given):
        it = iter(given)
        return call(p, [None if t is None else next(it) for t in tensors], layout=layout)

    assert torch.autograd.gradcheck(function, given, fast_mode=True)
    if layout == "split":
        assert torch.autograd.gradcheck(function, given)


def fused(gate, up, layout):
    both = (
        torch.cat if layout == "stacked" else (lambda pair, dim: torch.stack(pair, 2).flatten(1, 2))
    )
    return both([gate.detach(), up.detach()], dim=1).requires_grad_()


def test_G1_router_weights_get_their_gradient():
    p = problem(2, tokens=4, experts=2, topk=2, dropped=0)
    tensors = leaves(p)
    assert torch.autograd.gradcheck(lambda w: call(p, [tensors[0], w, *tensors[2:]]), tensors[1])
    # Right for any weight: zero and negative, too.
    with torch.no_grad():
        p.topk_weights[0], p.topk_weights[1] = 0.0, -2.0
    theirs = reference.gradients(p.x, p.ids, p.topk_weights, p.weights, p.d_y)
    torch.testing.assert_close(run(p)[2], theirs[2])


def test_G4_top_1():
    p = problem(3, topk=1, dropped=0)
    p.topk_weights.fill_(1.0)
    y, _, d_w, _ = run(p)
    torch.testing.assert_close(d_w[:, 0], (y * p.d_y).sum(1))  # dw = <f(x), d_y>
    assert d_w.abs().min() > 1e-6
    with pytest.raises(ValueError, match=r"topk_weights.*expected"):
        mok.moe(p.x, p.ids, p.topk_weights[:, 0], *p.weights.each())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_G7_x_without_grad(dtype):
    p = problem(4, dtype=dtype)
    tensors = leaves(p)
    tensors[0] = p.x
    y = call(p, tensors)
    assert y.requires_grad
    y.backward(p.d_y)
    full = run(p)
    assert p.x.grad is None
    for got, want in zip(tensors[1:5], [full[2], *full[3].each()[:3]], strict=True):
        assert same_bits(got.grad, want)


def test_G8_all_combinations_of_frozen_inputs():
    p = problem(5, shared=3, shared_gate=True, dtype=torch.bfloat16)
    y, d_x, d_w, grads = run(p)
    full = [d_x, d_w, *grads.each()]
    # x, router weights, (gate, up), down, shared expert
    parts = [[0], [1], [2, 3], [4], [5, 6, 7, 8]]
    for on in itertools.product([False, True], repeat=len(parts)):
        wanted = {i for part, yes in zip(parts, on, strict=True) if yes for i in part}
        tensors = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(leaves(p))]
        out = call(p, tensors)
        assert out.requires_grad == bool(wanted) and same_bits(out, y)
        if wanted:
            out.backward(p.d_y)
        for i, t in enumerate(tensors):
            assert (t.grad is not None) == (i in wanted), (on, i)
            assert i not in wanted or same_bits(t.grad, full[i]), (on, i)


def test_G8_gate_without_up():
    p = problem(6)
    tensors = leaves(p)
    tensors[3].requires_grad_(False)
    call(p, tensors).backward(p.d_y)
    assert tensors[3].grad is None and same_bits(tensors[2].grad, run(p)[3].gate)


def test_G8_unfreezing_later():
    layer = mok.MoELayer(8, 4, 2, 1, dtype=torch.float64)
    layer.w_up.requires_grad_(False)
    x = torch.randn(3, 8, dtype=torch.float64)
    layer(x).sum().backward()
    assert layer.w_up.grad is None and layer.w_gate.grad is not None
    layer.w_up.requires_grad_(True)
    layer(x).sum().backward()
    assert layer.w_up.grad.abs().sum() > 0


def test_G10_router_weights_are_applied_once():
    p = problem(7, dropped=0, dtype=torch.bfloat16)
    one, half = torch.ones_like(p.topk_weights), torch.full_like(p.topk_weights, 0.5)
    y = [mok.moe(p.x, p.ids, w, *p.weights.each()) for w in (one, half)]
    assert same_bits(y[0] / 2, y[1])


# ---- main_grad -------------------------------------------------------------------------------


def with_main_grads(tensors, start=0.0):
    for t in tensors[2:]:
        if t is not None:
            t.main_grad = torch.full(t.shape, start, dtype=torch.float32)
    return tensors


@pytest.mark.parametrize("layout", ["split", "stacked", "interleaved"])
def test_A1_gradient_arrives_in_the_promised_place(layout):
    p = problem(8, tokens=8, hidden=16, inner=32, experts=2, shared=5, shared_gate=True,
                dropped=0, dtype=torch.bfloat16)  # fmt: skip
    plain = leaves(p)
    mine = leaves(p)
    if layout != "split":
        for tensors in (plain, mine):
            tensors[2], tensors[3] = fused(tensors[2], tensors[3], layout), None
    with_main_grads(mine)
    call(p, plain, layout=layout).backward(p.d_y)
    for step in (1, 2):
        y = call(p, mine, layout=layout, accumulate=True)
        y.backward(p.d_y)
        for t, want in zip(mine[2:], plain[2:], strict=True):
            if t is None:
                continue
            assert t.grad is None and want.grad.abs().sum() > 0
            if step == 1:
                assert same_bits(t.main_grad.bfloat16(), want.grad)
                t.first = t.main_grad.clone()
            else:
                assert same_bits(t.main_grad, t.first + t.first)
    assert same_bits(mine[0].grad, plain[0].grad + plain[0].grad)


def test_A1_an_expert_without_rows_leaves_main_grad_as_it_was():
    p = problem(9, experts=3)
    p.ids[p.ids == 1] = -1
    p = problem_as(p, torch.bfloat16)
    tensors = with_main_grads(leaves(p), start=3.0)
    call(p, tensors, accumulate=True).backward(p.d_y)
    assert (tensors[4].main_grad[1] == 3).all() and (tensors[4].main_grad[0] != 3).any()


def problem_as(p, dtype):
    p.x, p.d_y = p.x.to(dtype), p.d_y.to(dtype)
    p.topk_weights = p.topk_weights.float()
    p.weights = reference.Weights(*(None if t is None else t.to(dtype) for t in p.weights.each()))
    return p


def test_A2_accumulate_is_refused_at_forward():
    p = problem(10, dtype=torch.bfloat16)
    tensors = with_main_grads(leaves(p))
    weight = tensors[4]
    before = weight.main_grad.clone()
    for wrong, error in (
        (None, ValueError),
        (torch.zeros(weight.shape, dtype=torch.bfloat16), TypeError),
        (torch.zeros(weight.shape[1:]), ValueError),
        (torch.zeros(weight.shape, device="meta"), ValueError),
        (torch.zeros(weight.shape, requires_grad=True), ValueError),
        (torch.zeros(*weight.shape, 2)[..., 0], ValueError),
        ("nothing", TypeError),
    ):
        weight.main_grad = wrong
        with pytest.raises(error, match=r"^w_down.main_grad"):
            call(p, tensors, accumulate=True)
    del weight.main_grad
    with pytest.raises(ValueError, match=r"^w_down.main_grad: missing"):
        call(p, tensors, accumulate=True)
    weight.requires_grad_(False)  # a frozen weight needs none
    call(p, tensors, accumulate=True).backward(p.d_y)
    weight.requires_grad_(True)
    weight.main_grad = before  # the next good call works
    call(p, tensors, accumulate=True).backward(p.d_y)
    assert weight.main_grad.abs().sum() > 0


def test_main_grad_with_converted_weights():
    layer = mok.MoELayer(8, 4, 2, 1, compute_dtype=torch.bfloat16, accumulate_into_main_grad=True)
    for w in layer.expert_parameters():
        w.main_grad = torch.zeros(w.shape)
    y = layer(torch.randn(3, 8))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    for w in layer.expert_parameters():
        assert w.grad is None and w.main_grad.abs().sum() > 0


def test_main_grad_with_several_micro_batches_in_flight():
    ps = [problem(seed, tokens=9 + seed, dtype=torch.bfloat16) for seed in range(3)]
    tensors = with_main_grads(leaves(ps[0]))
    ys = [call(p, [p.x, p.topk_weights, *tensors[2:]], accumulate=True) for p in ps]
    for i in (1, 0, 2):
        ys[i].backward(ps[i].d_y)
    want = 0
    for i in (1, 0, 2):
        alone = with_main_grads(leaves(ps[0]))
        call(ps[i], [ps[i].x, ps[i].topk_weights, *alone[2:]], accumulate=True).backward(ps[i].d_y)
        want = want + alone[4].main_grad
    torch.testing.assert_close(tensors[4].main_grad, want)


# ---- calls -----------------------------------------------------------------------------------


def test_micro_batches_in_flight_backward_in_any_order():
    ps = [problem(20 + i, tokens=5 + 7 * i, shared=3, dtype=torch.bfloat16) for i in range(4)]
    alone = [run(p) for p in ps]
    for order in itertools.permutations(range(4), 4):
        inputs = [leaves(p) for p in ps]
        ys = [call(p, t) for p, t in zip(ps, inputs, strict=True)]
        for i in order:
            ys[i].backward(ps[i].d_y)
        for y, t, want in zip(ys, inputs, alone, strict=True):
            grads = [None if v is None else v.grad for v in t]
            assert_same_bits((y, grads[0], grads[1], reference.Weights(*grads[2:])), want)


def test_R1_same_bits_every_time():
    p = problem(
        30, tokens=100, hidden=64, inner=32, experts=8, topk=3, shared=16, dtype=torch.bfloat16
    )
    first = run(p)
    for _ in range(20):
        assert_same_bits(run(p), first)


def test_R4_deterministic_mode_fills_new_tensors_before_they_are_written():
    p = problem(47, shared=4, dtype=torch.bfloat16)
    want = run(p)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert_same_bits(run(p), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_R2_order_of_other_layers_calls_does_not_matter():
    a, b = (
        problem(31, dtype=torch.bfloat16),
        problem(32, hidden=40, experts=4, dtype=torch.bfloat16),
    )
    first = run(a), run(b)
    second = run(b), run(a)
    assert_same_bits(first[0], second[1])
    assert_same_bits(first[1], second[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_inputs_with_strides(dtype):
    p = problem(33, tokens=8, shared=4, dtype=dtype)
    want = run(p)
    p.d_y = torch.stack([p.d_y, p.d_y], 2)[..., 0]  # columns two apart
    assert not p.d_y.is_contiguous()
    x = torch.cat([p.x, p.x], 1)[:, : p.x.shape[1]]  # rows two apart
    ids = torch.stack([p.ids, p.ids], 2)[..., 0]
    weights = [None if t is None else t.transpose(-1, -2).contiguous().transpose(-1, -2)
               for t in p.weights.each()]  # fmt: skip
    tensors = [
        t if t is None else t.detach().requires_grad_() for t in (x, p.topk_weights, *weights)
    ]
    y = mok.moe(tensors[0], ids, tensors[1], *tensors[2:])
    y.backward(p.d_y)
    grads = [None if t is None else t.grad for t in tensors]
    assert_same_bits((y, grads[0], grads[1], reference.Weights(*grads[2:])), want)


def test_expanded_d_y():
    p = problem(34)
    tensors = leaves(p)
    call(p, tensors).sum().backward()  # a d_y whose strides are 0
    p.d_y = torch.ones_like(p.d_y)
    assert same_bits(tensors[0].grad, run(p)[1])


def test_int32_ids_are_the_same():
    p = problem(35, dtype=torch.bfloat16)
    want = run(p)
    p.ids = p.ids.int()
    assert_same_bits(run(p), want)


def test_rows_beyond_the_saved_ones_are_recomputed():
    p = problem(36, tokens=50, shared=4, dtype=torch.bfloat16)
    want = run(p)
    for saved in (0, 1, 128):
        group = mok.new_group(options=mok.Options(saved_rows=saved))
        assert_same_bits(run(p, group), want)


def test_E3_one_rank_is_a_full_path():
    p = problem(37, tokens=3, topk=2)
    for group in (None, mok.new_group(max_tokens=3), mok.new_group()):
        y = run(p, group)[0]
        assert y.shape == p.x.shape
        theirs = reference.moe(p.x, p.ids, p.topk_weights, p.weights)
        torch.testing.assert_close(y, theirs)


def test_Z6_an_expert_without_rows_gets_zeros_and_decays_like_the_others():
    layer = mok.MoELayer(8, 4, 4, 1)
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    optimizer = torch.optim.AdamW(layer.expert_parameters(), lr=0.5, weight_decay=0.1)
    x = torch.randn(5, 8)
    layer(x, topk_ids=torch.full((5, 1), -1), topk_weights=torch.ones(5, 1)).sum().backward()
    for w in layer.expert_parameters():
        assert w.grad.shape == w.shape and not w.grad.view(torch.int32).any()  # exactly +0
    optimizer.step()
    for name in ("w_gate", "w_up", "w_down"):
        torch.testing.assert_close(getattr(layer, name), before[name] * (1 - 0.5 * 0.1))


@pytest.mark.parametrize("tokens", [0, 1])
def test_Z5_no_tokens(tokens):
    p = problem(38, tokens=tokens, shared=3, shared_gate=True, dtype=torch.bfloat16)
    for _ in range(2):
        y, d_x, d_w, grads = run(p)
        assert y.shape == d_x.shape == p.x.shape and d_w.shape == p.ids.shape
        if tokens == 0:
            assert all(not g.float().any() for g in grads.each())


def test_B10_another_routing_in_backward_is_an_error():
    p = problem(39)
    tensors = leaves(p)
    y = call(p, tensors)
    with torch.no_grad():
        p.ids[0, 0] = (p.ids[0, 0] + 1) % p.experts
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    ids = p.ids.clone()
    y = mok.moe(tensors[0], ids, tensors[1], *tensors[2:])
    ids.data[0, 0] = (ids[0, 0] + 1) % p.experts  # behind autograd's back
    with pytest.raises(ValueError, match="topk_ids: not those of the forward pass"):
        y.sum().backward()
    run(p)  # the next good call works


def test_second_derivatives_are_refused():
    p = problem(40)
    tensors = leaves(p)
    (d_x,) = torch.autograd.grad(call(p, tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        d_x.sum().backward()
    tensors = with_main_grads(leaves(problem_as(p, torch.bfloat16)))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(call(p, tensors, accumulate=True).sum(), tensors[0], create_graph=True)


# ---- memory ----------------------------------------------------------------------------------


def test_O1_saved_tensors_are_released_in_backward():
    p = problem(41, shared=4, shared_gate=True)
    saved = []

    def pack(t):
        # Inputs live on in `tensors`; what the layer made itself must go.
        saved.append(weakref.ref(t))
        return t

    tensors = leaves(p)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call(p, tensors)
    mine = {id(t) for t in tensors} | {id(p.ids)}
    kept = [r for r in saved if r() is not None and id(r()) not in mine]
    assert kept, "nothing was saved?"
    y.backward(p.d_y)
    gc.collect()
    assert [r().shape for r in kept if r() is not None] == []


def test_gradients_of_weights_share_two_blocks():
    p = problem(44, shared=4, shared_gate=True, hidden=6, inner=5)
    _, _, *grads = torch.autograd.grad(call(p, (tensors := leaves(p))), tensors, p.d_y)
    ends = []
    for grad, weight in zip(grads, tensors[2:], strict=True):
        assert grad.is_contiguous() and grad.shape == weight.shape
        ends.append((grad.data_ptr(), grad.data_ptr() + grad.numel() * grad.element_size()))
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 2
    for (_, end), (begin, _) in itertools.pairwise(sorted(ends)):
        assert end <= begin
    # One that is wanted alone has memory of its own.
    frozen = [t.detach() for t in tensors]
    frozen[3].requires_grad_()
    (grad,) = torch.autograd.grad(call(p, frozen), frozen[3], p.d_y)
    assert same_bits(grad, grads[1])
    assert grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()


def test_no_grad_keeps_nothing():
    p = problem(42, shared=4)
    with torch.no_grad():
        outputs = torch_forward_outputs(p)
    assert outputs[0].shape == p.x.shape and outputs[1:] == [None, None]


def torch_forward_outputs(p):
    found = []
    operator = torch.ops.mok.forward_eager

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is operator.default:
                found.extend(out)
            return out

    with Spy():
        mok.moe(p.x, p.ids, p.topk_weights, *p.weights.each())
    return found


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_B4_memory_stays_flat():
    p = problem(43, tokens=64, hidden=64, inner=32, dtype=torch.bfloat16)
    tensors = leaves(p)

    def steps(n):
        for _ in range(n):
            call(p, tensors).backward(p.d_y)
            with torch.no_grad():
                call(p, tensors)
            call(p, tensors)  # forward without backward
        gc.collect()
        return resident()

    steps(50)
    before = steps(1)
    grown = steps(300) - before
    assert grown < 4 << 20, f"{grown} bytes in 300 steps"


def test_B5_first_call_in_inference_mode():
    p = problem(44, hidden=20, inner=6)  # a shape of its own: a new workspace
    with torch.inference_mode():
        y = call(p, [p.x, p.topk_weights, *p.weights.each()])
        assert y.is_inference()
    trained = run(p)
    assert same_bits(trained[0], y) and trained[1] is not None


def test_B8_groups_are_cheap_to_make_and_to_close():
    p = problem(45, dtype=torch.bfloat16)
    want = run(p)
    for _ in range(20):
        group = mok.new_group(max_tokens=64)
        assert_same_bits(run(p, group), want)
        assert group.memory_bytes() > 0
        group.close()


def test_names_of_a_result_are_complete():
    p = problem(46, shared=3, shared_gate=True)
    assert len(flat(run(p))) == 10
