"""Precisions mxfp8 and fp8: mok.moe, MoELayer, and the tuples of mok.functional."""

import copy

import mok
import pytest
import ranks
import torch
from modules import check_noticed_changes
from mok import functional as F
from problems import assert_same_bits, flat, leaves, part, problem, run, same_bits, whole

from reference import bf16, error

PRECISIONS = ("mxfp8", "fp8")
ROUTED = ("y", "d_x", "d_topk_weights", "d_gate", "d_up", "d_down")


def small(seed=1, **changes):
    settings = {"tokens": 30, "hidden": 160, "inner": 136, "experts": 8, "topk": 3,
                "dtype": torch.bfloat16, **changes}  # fmt: skip
    return problem(seed, **settings)


def rounded(m, precision, transposed=False):
    """A weight or a row as products see it, in float64; PyTorch's own E4M3, blocks by hand."""
    if transposed:
        return rounded(m.mT, precision).mT
    m = m.double()
    wide, tall = {"mxfp8": (32, 1), "fp8": (128, 128 if m.dim() == 3 else 1)}[precision]
    rows, columns = m.shape[-2:]
    padded = torch.nn.functional.pad(m, (0, -columns % wide, 0, -rows % tall))
    blocks = padded.unflatten(-1, (-1, wide)).unflatten(-3, (-1, tall))
    amax = blocks.abs().amax((-1, -3), keepdim=True).clamp_min(1e-12)
    unit = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    codes = (blocks / unit).to(torch.float8_e4m3fn).double()
    return (codes * unit).flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_values(precision):
    """The contract once more: what is quantised along what, forward and backward."""
    p = small(2, dropped=0.2)
    y, d_x, d_weights, grads = run(p, precision=precision)
    w = p.weights
    gate, up, down = (rounded(m, precision) for m in (w.gate, w.up, w.down))
    gate_t, up_t, down_t = (rounded(m, precision, True) for m in (w.gate, w.up, w.down))
    x, d_y = rounded(p.x, precision), rounded(p.d_y, precision)
    want_y, want_d_x = torch.zeros_like(x), torch.zeros_like(x)
    want_d_weights = torch.zeros_like(d_weights, dtype=torch.float64)
    want = [torch.zeros_like(m) for m in (gate, up, down)]
    for t, k in (p.ids >= 0).nonzero().tolist():
        e, factor = p.ids[t, k].item(), p.topk_weights[t, k].double()
        g, u = bf16(gate[e] @ x[t]), bf16(up[e] @ x[t])
        s = torch.sigmoid(g)
        h = rounded(bf16(g * s * u)[None], precision)[0]
        want_y[t] += factor * bf16(down[e] @ h)
        d_h = bf16(d_y[t] @ down_t[e])
        want_d_weights[t, k] = d_h @ h
        d_g = rounded(bf16(factor * d_h * u * s * (1 + g * (1 - s)))[None], precision)[0]
        d_u = rounded(bf16(factor * d_h * g * s)[None], precision)[0]
        want_d_x[t] += bf16(d_g @ gate_t[e] + d_u @ up_t[e])
        want[0][e] += torch.outer(d_g, x[t])
        want[1][e] += torch.outer(d_u, x[t])
        want[2][e] += torch.outer(d_y[t], bf16(factor * h))
    pairs = [(y, want_y), (d_x, want_d_x), (d_weights, want_d_weights),
             *zip(grads.each()[:3], want, strict=True)]  # fmt: skip
    for name, (got, wanted) in zip(ROUTED, pairs, strict=True):
        difference = (got.double() - wanted).norm() / wanted.norm()
        assert difference < 6e-3, name  # bf16 outputs: 2^-9 each; E4M3 errs by 2.6e-2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_near_bf16(precision):
    p = small(3, shared=24, shared_gate=True)
    for (name, got), (_, want) in zip(flat(run(p, precision=precision)), flat(run(p)), strict=True):
        distance = (got.double() - want.double()).norm() / want.double().norm()
        if name.startswith(("d_shared", "d_gate_vector")):
            assert distance == 0, name  # the shared expert stays as it is
        else:
            # Up to six operands with independent errors of 2.6e-2, through the slope of silu.
            assert 1e-2 < distance < 0.12, name
    assert_same_bits(run(p, precision="bf16"), run(p))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_given_weights_have_the_same_bits_in_every_layout(precision):
    p = small(4)
    w = p.weights
    want = run(p, precision=precision)
    fp8 = mok.quantize_weights(precision, w.gate, w.up, w.down)
    assert_same_bits(run(p, precision=precision, quantized=fp8), want)
    stacked = torch.cat([w.gate, w.up], 1)
    interleaved = torch.stack([w.gate, w.up], 2).flatten(1, 2)
    for layout, both in (("stacked", stacked), ("interleaved", interleaved)):
        again = mok.quantize_weights(precision, both, None, w.down, layout=layout)
        assert all(same_bits(a, b) for a, b in zip(again, fp8, strict=True))
        y = mok.moe(p.x, p.ids, p.topk_weights, both, None, w.down, layout=layout,
                    precision=precision)  # fmt: skip
        assert same_bits(y, want[0])


def run_part(rank, p, splits, precision):
    return run(part(p, rank, splits), precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_bits_for_every_number_of_ranks(precision):
    p = small(5)
    together = whole(ranks.run(3, run_part, part_of_six(p), (7, 0, 23), precision))
    assert_same_bits(together, run(part_of_six(p), precision=precision), only=ROUTED)


def part_of_six(p):
    """The problem with six experts, which three ranks can share."""
    w = p.weights
    smaller = copy.copy(p)
    smaller.weights = type(w)(w.gate[:6], w.up[:6], w.down[:6])
    smaller.ids = torch.where(p.ids < 6, p.ids, -1)
    return smaller


@pytest.mark.parametrize("precision", PRECISIONS)
def test_main_grad(precision):
    p = small(6)
    _, _, _, grads = run(p, precision=precision)
    tensors = leaves(p)
    for tensor in tensors[2:5]:
        tensor.main_grad = torch.ones(tensor.shape)
    y = mok.moe(tensors[0], p.ids, *tensors[1:5], accumulate=True, precision=precision)
    y.backward(p.d_y)
    for tensor, grad in zip(tensors[2:5], grads.each()[:3], strict=True):
        assert tensor.grad is None
        assert error(tensor.main_grad - 1, grad) < 1e-2  # grad is rounded to bf16


# ---- the module -------------------------------------------------------------------------------


def layer_of(precision, **changes):
    torch.manual_seed(7)
    settings = {"dtype": torch.bfloat16, "precision": precision, **changes}
    return mok.MoELayer(64, 48, 4, 2, **settings)


@pytest.mark.parametrize("layout", ["split", "stacked", "interleaved"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_layer_requantises_when_a_parameter_changed(precision, layout):
    x = torch.randn(20, 64).bfloat16()
    layer = check_noticed_changes(lambda: layer_of(precision, layout=layout), x)
    assert same_bits(copy.deepcopy(layer)(x), layer(x))
    first = layer(x)
    for other in (*PRECISIONS, "bf16", precision):
        layer.precision = other
        y = layer(x)
    assert same_bits(y, first)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled_and_converted_layers_agree(precision):
    layer = layer_of(precision)
    x = torch.randn(20, 64).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x), layer(x))
    wide = layer_of(precision, dtype=torch.float32, compute_dtype=torch.bfloat16)
    narrow = layer_of(precision)
    narrow.load_state_dict({k: v.to(narrow.state_dict()[k].dtype)
                            for k, v in wide.state_dict().items()})  # fmt: skip
    assert same_bits(wide(x), narrow(x))


def test_gradient_checkpointing():
    layer = layer_of("mxfp8")
    grads = []
    for keep in (True, False):
        layer.zero_grad()
        x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        x.requires_grad_()
        y = layer(x) if keep else torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        y.float().square().sum().backward()
        grads.append([x.grad, *(p.grad for p in layer.parameters())])
    assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))


def test_errors():
    p = small(8)
    w = p.weights
    given = (p.x, p.ids, p.topk_weights, w.gate, w.up, w.down)
    fp8 = mok.quantize_weights("mxfp8", w.gate, w.up, w.down)
    for settings, kind, name in (
        ({"precision": "fp4"}, ValueError, "precision"),
        ({"precision": 8}, TypeError, "precision"),
        ({"quantized": fp8}, ValueError, "quantized"),
        ({"precision": "mxfp8", "quantized": tuple(fp8)}, TypeError, "quantized"),
        ({"precision": "fp8", "quantized": fp8}, ValueError, "mok .bad argument.: quantized.gate"),
    ):
        with pytest.raises(kind, match=f"^{name}"):
            mok.moe(*given, **settings)
    with pytest.raises(TypeError, match=r"^w_down: .*precision mxfp8"):
        mok.moe(*(t.float() if t.is_floating_point() else t for t in given), precision="mxfp8")
    with pytest.raises(ValueError, match=r"^precision: "):
        mok.quantize_weights("bf16", w.gate, w.up, w.down)
    with pytest.raises(ValueError, match=r"^precision: mxfp8 is of bf16 weights"):
        mok.MoELayer(64, 48, 4, 2, dtype=torch.float32, precision="mxfp8")
    with pytest.raises(ValueError, match=r"^precision: "):
        mok.MoELayer(64, 48, 4, 2, dtype=torch.bfloat16, precision="int8")


# ---- mok.functional ---------------------------------------------------------------------------


def tuples(p):
    """Forward's and backward's routed weights, quantised with the published function."""
    w = p.weights
    gate, up, down = (mok.ops.mxfp8_quantize(m, True, True) for m in (w.gate, w.up, w.down))
    return (gate[:2], up[:2], down[:2]), (gate, up, down[2:])


def start(p):
    F.clear_workspace_cache()
    config = F.MoKConfig()
    workspace = F.get_workspace(config, None, device="cpu", num_local_tokens=len(p.x),
                                hidden_size=p.x.shape[1], topk=p.ids.shape[1])  # fmt: skip
    schedule = F.build_schedule(workspace, config, p.ids, num_local_experts=p.experts)
    return config, workspace, schedule


@pytest.mark.parametrize("shared", [0, 24])
def test_functional_tuples_are_the_layer_in_mxfp8(shared):
    p = small(9, shared=shared, limit=2.0)
    want = run(p, precision="mxfp8")
    state, (forward, backward) = start(p), tuples(p)
    w = p.weights
    three = (w.shared_gate, w.shared_up, w.shared_down)
    x = p.x.clone().requires_grad_()
    y, context = F.forward(*state, x, p.topk_weights, *three, *forward, swiglu_limit=p.limit)
    assert same_bits(y, want[0]) and not y.requires_grad
    contexts = [context]
    for gate, up in (forward[:2], backward[:2]):
        contexts.append(
            F.recompute_forward_context(
                *state, p.x, *three[:2], gate, up, swiglu_limit=p.limit
            )
        )  # fmt: skip
    for context in contexts:
        grads = F.backward(*state, context, p.d_y, p.x, p.topk_weights, *three, *backward,
                           swiglu_limit=p.limit)  # fmt: skip
        d_x, d_weights, d_gate, d_up, d_down = grads[:5]
        assert d_gate.dtype == torch.bfloat16
        got = (y, d_x, d_weights, type(w)(d_gate, d_up, d_down, *grads[5:]))
        assert_same_bits(got, want)
    targets = tuple(None if m is None else torch.zeros(m.shape) for m in (*three, w.gate, w.up,
                                                                         w.down))  # fmt: skip
    F.backward(*state, contexts[0], p.d_y, p.x, p.topk_weights, *three, *backward,
               swiglu_limit=p.limit, main_grads=targets)  # fmt: skip
    for target, grad in zip(targets[3:], want[3].each()[:3], strict=True):
        assert same_bits(target.bfloat16(), grad)


def test_functional_errors():
    p = small(10)
    state, (forward, backward) = start(p), tuples(p)
    names = ("routed_gate_weights", "routed_up_weights", "routed_down_weights")
    none = (None,) * 3

    def call(function, routed, *more):
        arguments = (p.x, p.topk_weights, *none)
        return function(*state, *more, *arguments, *routed)

    _, context = call(F.forward, forward)
    for function, routed, more in (
        (F.forward, forward, ()),
        (F.backward, backward, (context, p.d_y)),
    ):
        for i, name in enumerate(names):
            good = routed[i]
            for bad, kind, place in (
                (good[0], TypeError, "" if i else r"|routed_up_weights"),
                (good[:1], ValueError, ""),
                ((*good, good[0]), ValueError, ""),
                ((None, *good[1:]), TypeError, r"\[0\]"),
                ((good[0].bfloat16(), *good[1:]), ValueError, r"\[0\]"),
                ((good[0], good[1][:-1], *good[2:]), ValueError, r"\[1\]"),
                ((good[0], good[1].float(), *good[2:]), ValueError, r"\[1\]"),
            ):
                wrong = (*routed[:i], bad, *routed[i + 1 :])
                with pytest.raises(kind, match=rf"^({name}{place}): |^{name}{place}: "):
                    call(function, wrong, *more)
    with pytest.raises(ValueError, match=r"^x: dtype"):
        F.forward(*state, p.x.float(), p.topk_weights, *none, *forward)
