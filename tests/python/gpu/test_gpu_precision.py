"""Precisions mxfp8 and fp8 on a GPU: values of the CPU, bits of itself, who quantises the weights,
errors."""

import mok
import pytest
import torch
from gpu_problems import DEVICE, gpu_problem, moved
from modules import check_noticed_changes
from mok import functional as F
from problems import assert_same_bits, flat, leaves, run, same_bits
from torch.utils.checkpoint import checkpoint

from reference import Weights

MX = "mxfp8"


each_precision = pytest.mark.parametrize("precision", [MX, "fp8"])


def quantized(p, precision=MX):
    w = p.weights
    return mok.quantize_weights(precision, w.gate, w.up, w.down)


@each_precision
@pytest.mark.parametrize("settings", [{}, {"tokens": 1, "dropped": 0},
                                      {"tokens": 700, "hidden": 320, "inner": 192},
                                      {"shared": 128, "shared_gate": True}], ids=str)  # fmt: skip
def test_the_values_of_the_cpu(settings, precision):
    p = gpu_problem(50, **settings)
    result = moved(run(p, precision=precision), "cpu")
    host = run(moved(p, "cpu"), precision=precision)
    for (name, a), (_, b) in zip(flat(result), flat(host), strict=True):
        # Sums differ in their last bits: a flip of bf16 is 2^-8, and one in eight of those among
        # h, d_g and d_u becomes a jump of E4M3. Quantised and not they differ by 6e-2.
        assert (a.double() - b.double()).norm() < 1e-2 * b.double().norm(), name
    plain = moved(run(p), "cpu")
    assert not same_bits(plain[0], result[0])
    for a, b in zip(plain[3].each()[3:], result[3].each()[3:], strict=True):
        assert a is None or same_bits(a, b)  # the shared expert stays as it is


@each_precision
def test_same_bits_every_time_with_any_option(precision):
    p = gpu_problem(51, tokens=500, shared=64, shared_gate=True)
    want = run(p, precision=precision)
    for options in (None, mok.Options(saved_rows=0), mok.Options(ring_rows=256, minibatch_rows=128),
                    mok.Options(sm_reserve=64, comm_blocks=8)):  # fmt: skip
        group = mok.new_group(options=options)
        for _ in range(3):
            assert_same_bits(run(p, group, precision=precision), want)
        group.close()
    assert_same_bits(run(p, precision="bf16"), run(p))


# ---- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 128), (3, 192, 320), (0, 64), (2, 32, 96)], ids=str)
def test_rounding_is_quantising_there_and_back(shape):
    x = (torch.randn(shape) * torch.exp(4 * torch.randn(shape))).bfloat16()
    codes, scales, codes_t, scales_t = mok.ops.mxfp8_quantize(x, True, True)
    want = (mok.ops.mxfp8_dequantize(codes, scales),
            mok.ops.mxfp8_dequantize(codes_t, scales_t).mT.contiguous())  # fmt: skip
    for tensor in (x, x.cuda(), x.cuda().mT.contiguous().mT):
        got = torch.ops.mok.mxfp8_round(tensor, True, True)
        assert all(same_bits(a.cpu(), b) for a, b in zip(got, want, strict=True))
    assert torch.ops.mok.mxfp8_round(x.cuda(), False, True)[0] is None
    with pytest.raises(ValueError, match=r"x_bf16: .*multiples of 32"):
        torch.ops.mok.mxfp8_round(torch.ones(33, 64, device="cuda").bfloat16(), True, True)


@each_precision
def test_given_weights_of_either_form_have_the_same_bits(precision):
    p = gpu_problem(52)
    want = run(p, precision=precision)
    made = quantized(p, precision)
    assert isinstance(made, mok.RoundedWeights if precision == MX else mok.QuantizedWeights)
    assert_same_bits(run(p, precision=precision, quantized=made), want)
    w = p.weights
    fp8 = mok.quantize_weights(precision, w.gate.cpu(), w.up.cpu(), w.down.cpu())
    fp8 = mok.QuantizedWeights(*(t.cuda() for t in fp8))
    assert_same_bits(run(p, precision=precision, quantized=fp8), want)
    stacked = torch.cat([w.gate, w.up], 1)
    interleaved = torch.stack([w.gate, w.up], 2).flatten(1, 2)
    for layout, both in (("stacked", stacked), ("interleaved", interleaved)):
        again = mok.quantize_weights(precision, both, None, w.down, layout=layout)
        assert all(same_bits(a, b) for a, b in zip(again, made, strict=True))
        given = (p.x, p.ids, p.topk_weights, both, None, w.down)
        y = mok.moe(*given, layout=layout, precision=precision)
        assert same_bits(y, want[0])


def test_what_does_not_fit_is_named():
    p = gpu_problem(53)
    made = quantized(p)
    given = (p.x, p.ids, p.topk_weights, *p.weights.each()[:3])
    codes = quantized(p, "fp8")
    for precision, wrong, text in (
        (MX, made._replace(gate=made.gate[:4]), "quantized.gate"),
        (MX, made._replace(down=made.down.float()), "quantized.down"),
        (MX, made._replace(up=made.up.cpu()), "quantized.up"),
        ("fp8", made, "quantized"),
        ("fp8", codes._replace(gate=codes.gate[:4]), "quantized.gate"),
        ("fp8", codes._replace(down_scales=codes.down_scales[:1]), "quantized.down"),
        ("fp8", codes._replace(up=codes.up.cpu()), "quantized.up"),
    ):
        with pytest.raises(ValueError, match=text):
            mok.moe(*given, precision=precision, quantized=wrong)
    host = moved(p, "cpu")
    with pytest.raises(ValueError, match=r"quantized\.gate"):
        run(host, precision=MX, quantized=mok.RoundedWeights(*moved(list(made), "cpu")))
    assert_same_bits(run(p, precision=MX), run(p, precision=MX))


# ---- the module ------------------------------------------------------------------------------


def layer_of(**settings):
    torch.manual_seed(7)
    settings = {"dtype": torch.bfloat16, "device": DEVICE, "precision": MX, **settings}
    return mok.MoELayer(128, 64, 8, 2, **settings)


@each_precision
@pytest.mark.parametrize("layout", ["split", "stacked", "interleaved"])
def test_the_layer_quantises_again_when_a_parameter_changed(layout, precision):
    x = torch.randn(50, 128, device=DEVICE).bfloat16()
    check_noticed_changes(lambda: layer_of(layout=layout, precision=precision), x)


def grads_of(layer, x, function=None):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = (layer if function is None else function)(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@each_precision
def test_compiled_and_checkpointed(precision):
    layer = layer_of(precision=precision)
    x = torch.randn(50, 128, device=DEVICE).bfloat16()
    want = grads_of(layer, x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for function in (compiled, lambda x: checkpoint(layer, x, use_reentrant=False)):
        assert all(same_bits(a, b) for a, b in zip(grads_of(layer, x, function), want, strict=True))


@each_precision
def test_a_graph_quantises_what_the_weights_are_at_its_replay(precision):
    layer = layer_of(router=None, precision=precision)
    p = gpu_problem(54, tokens=50, topk=2)
    with torch.no_grad():
        for _ in range(2):
            layer(p.x, topk_ids=p.ids, topk_weights=p.topk_weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(p.x, topk_ids=p.ids, topk_weights=p.topk_weights)
        for _ in range(2):
            layer.w_gate.mul_(1.7)
            p.x.mul_(0.6)
            graph.replay()
            assert same_bits(y, layer(p.x, topk_ids=p.ids, topk_weights=p.topk_weights))
    mok.synchronize()


@each_precision
def test_main_grad(precision):
    p = gpu_problem(55)
    grads = run(p, precision=precision)[3]
    tensors = leaves(p)
    for t in tensors[2:5]:
        t.main_grad = torch.zeros(t.shape, device=DEVICE)
    y = mok.moe(tensors[0], p.ids, *tensors[1:5], accumulate=True, precision=precision)
    y.backward(p.d_y)
    for t, grad in zip(tensors[2:5], grads.each()[:3], strict=True):
        assert t.grad is None and same_bits(t.main_grad.bfloat16(), grad)


# ---- mok.functional --------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 64])
def test_functional_tuples_are_the_layer_in_mxfp8(shared):
    p = gpu_problem(56, shared=shared, limit=2.0)
    want = run(p, precision=MX)
    w = p.weights
    config = F.MoKConfig()
    workspace = F.get_workspace(
        config, None, device="cuda", num_local_tokens=37, hidden_size=128, topk=3
    )
    schedule = F.build_schedule(workspace, config, p.ids, num_local_experts=8)
    state = (config, workspace, schedule)
    gate, up, down = (mok.ops.mxfp8_quantize(m, True, True) for m in (w.gate, w.up, w.down))
    three = (w.shared_gate, w.shared_up, w.shared_down)
    y, context = F.forward(*state, p.x, p.topk_weights, *three, gate[:2], up[:2], down[:2],
                           swiglu_limit=p.limit)  # fmt: skip
    again = F.recompute_forward_context(*state, p.x, *three[:2], gate[:2], up[:2],
                                        swiglu_limit=p.limit)  # fmt: skip
    for kept in (context, again):
        grads = F.backward(*state, kept, p.d_y, p.x, p.topk_weights, *three, gate, up, down[2:],
                           swiglu_limit=p.limit)  # fmt: skip
        got = (y, *grads[:2], Weights(*grads[2:]))
        assert_same_bits(got, want)
    F.clear_workspace_cache()
