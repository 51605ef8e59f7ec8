"""MoELayer: parameters, layouts, masks, routing that it returns, autocast."""

import copy
import math

import mok
import pytest
import torch
from problems import same_bits

import reference
from reference import Weights


def make(**settings):
    torch.manual_seed(0)
    return mok.MoELayer(**{"hidden": 12, "intermediate": 6, "experts": 4, "topk": 2, **settings})


def gate_and_up(layer):
    if layer.layout == "split":
        return layer.w_gate, layer.w_up
    if layer.layout == "stacked":
        return layer.w_gate_up.chunk(2, dim=1)
    return layer.w_gate_up[:, 0::2], layer.w_gate_up[:, 1::2]


def expected(layer, x, ids, weights):
    w = Weights(*gate_and_up(layer), layer.w_down, layer.w_shared_gate, layer.w_shared_up,
                layer.w_shared_down, layer.shared_gate_vector)  # fmt: skip
    w = Weights(*(None if t is None else t.detach().double() for t in w.each()))
    flat = x.detach().double().reshape(-1, x.shape[-1])
    y = reference.moe(
        flat, ids.flatten(0, -2), weights.flatten(0, -2).double(), w, layer.swiglu_limit
    )
    return y.view(x.shape)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shared_intermediate": 5, "shared_gate": True, "swiglu_limit": 0.5},
        {"layout": "stacked", "router": mok.RouterConfig("sigmoid", scale=2.5, bias=True)},
        {"layout": "interleaved", "router": mok.RouterConfig("sqrt_softplus", False)},
    ],
    ids=str,
)
def test_layer_is_router_and_experts(settings):
    layer = make(**settings, dtype=torch.float64)
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    y, routing = layer(x, return_routing=True)
    assert y.shape == x.shape and same_bits(y, layer(x))
    torch.testing.assert_close(y, expected(layer, x, routing.topk_ids, routing.topk_weights))
    logits = x @ layer.router_weight.T
    ids, weights, scores = mok.route(logits.flatten(0, 1), 2, layer.router, bias=layer.router_bias)
    assert torch.equal(routing.topk_ids, ids.view(2, 3, 2))
    torch.testing.assert_close(routing.topk_weights, weights.view(2, 3, 2))
    torch.testing.assert_close(routing.logits, logits)
    torch.testing.assert_close(routing.probabilities, scores.view(2, 3, 4))
    assert torch.equal(routing.counts, mok.expert_counts(ids, 4))
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters()) and x.grad is not None


def test_G2_the_router_learns_from_the_output():
    layer = make(dtype=torch.float64, router=mok.RouterConfig("sigmoid", renormalise=False))
    x = torch.randn(5, 12, dtype=torch.float64)

    def loss(weight):
        layer.router_weight.data = weight
        return torch.func.functional_call(layer, {"router_weight": weight}, (x,)).square().sum()

    weight = layer.router_weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, weight, eps=1e-7, atol=1e-5)


def test_layouts_hold_the_same_model():
    layers = [
        make(layout=layout, dtype=torch.bfloat16) for layout in ("split", "stacked", "interleaved")
    ]
    x = torch.randn(7, 12).bfloat16()
    outs = [layer(x) for layer in layers]
    assert same_bits(outs[0], outs[1]) and same_bits(outs[0], outs[2])
    for out in outs:
        out.float().sum().backward()
    stacked = torch.cat([layers[0].w_gate.grad, layers[0].w_up.grad], 1)
    assert same_bits(layers[1].w_gate_up.grad, stacked)
    assert same_bits(layers[2].w_gate_up.grad[:, 0::2], layers[0].w_gate.grad)
    assert same_bits(layers[2].w_gate_up.grad[:, 1::2], layers[0].w_up.grad)


def test_W3_the_layout_is_an_explicit_argument():
    """H = 4, I = 2, weights of distinct primes."""
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53]
    both = torch.tensor(primes, dtype=torch.float64).view(1, 4, 4) / 50
    down = torch.tensor([[[59, 61], [67, 71], [73, 79], [83, 89]]], dtype=torch.float64) / 50
    x = torch.tensor([[1.0, -1.0, 2.0, 0.5]], dtype=torch.float64)
    ids, one = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.float64)
    gates = {"stacked": (both[0, :2], both[0, 2:]), "interleaved": (both[0, 0::2], both[0, 1::2])}
    for layout, (gate, up) in gates.items():
        g, u = x @ gate.T, x @ up.T
        want = (g * torch.sigmoid(g) * u) @ down[0].T
        torch.testing.assert_close(mok.moe(x, ids, one, both, None, down, layout=layout), want)
        torch.testing.assert_close(mok.moe(x, ids, one, gate[None], up[None], down), want)
    with pytest.raises(ValueError, match="w_up"):
        mok.moe(x, ids, one, both, None, down)
    with pytest.raises(ValueError, match="w_up"):
        mok.moe(x, ids, one, both, both, down, layout="stacked")
    with pytest.raises(ValueError, match="layout"):
        mok.moe(x, ids, one, both, None, down, layout="rows")


def test_ids_and_weights_from_outside():
    layer = make(router=None, dtype=torch.float64)
    assert layer.router_weight is None
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    ids = torch.randint(-1, 4, (2, 3, 4), dtype=torch.int32)  # another K
    weights = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    y, routing = layer(x, topk_ids=ids, topk_weights=weights, return_routing=True)
    torch.testing.assert_close(y, expected(layer, x, ids.long(), weights))
    assert routing.logits is None and routing.probabilities is None
    assert routing.counts.sum() == (ids >= 0).sum()
    y.sum().backward()
    assert weights.grad.shape == weights.shape
    with pytest.raises(ValueError, match="topk_ids, topk_weights: needed"):
        layer(x)
    with pytest.raises(ValueError, match="give both or neither"):
        layer(x, topk_ids=ids)


@pytest.mark.parametrize("shared", [0, 5])
def test_M6_token_mask(shared):
    layer = make(shared_intermediate=shared, dtype=torch.float64)
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    if not shared:
        x[~mask] = math.nan  # padding is inert
    y, routing = layer(x, token_mask=mask, return_routing=True)
    assert routing.counts.sum() == 4 * 2 and (routing.topk_ids[~mask] == -1).all()
    assert same_bits(y[mask], layer(x[mask]))
    if not shared:
        assert (y[~mask] == 0).all()
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    # Given ids are masked as well.
    ids = torch.zeros(2, 3, 1, dtype=torch.int64)
    weights = torch.ones(2, 3, 1, dtype=torch.float64)
    _, routing = layer(x, token_mask=mask, topk_ids=ids, topk_weights=weights, return_routing=True)
    assert routing.counts.tolist() == [4, 0, 0, 0]


def test_M5_duplicates_count_each_slot():
    layer = make(router=None, dtype=torch.float64)
    x = torch.randn(10, 12, dtype=torch.float64)
    ids = torch.tensor([[0, 1]] * 7 + [[1, 1]] * 3)
    weights = torch.rand(10, 2, dtype=torch.float64)
    y, routing = layer(x, topk_ids=ids, topk_weights=weights, return_routing=True)
    assert routing.counts.tolist() == [7, 13, 0, 0]
    torch.testing.assert_close(y, expected(layer, x, ids, weights))


def test_B6_evaluation_changes_no_state():
    layer = make()
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(4, 12)
    counts = layer(x, return_routing=True)[1].counts
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x, return_routing=True)[1].counts, counts)
    layer.train()
    assert torch.equal(layer(x, return_routing=True)[1].counts, counts)
    after = layer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert {k for k, v in vars(layer).items() if isinstance(v, torch.Tensor)} == set()


def test_W4_dtypes_without_autocast_must_fit():
    x = torch.randn(4, 12)
    assert make()(x).dtype == torch.float32
    assert make(dtype=torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"^x: dtype torch.float32, expected torch.bfloat16"):
        make(dtype=torch.bfloat16)(x)
    with pytest.raises(TypeError, match=r"^x: dtype torch.float16"):
        make()(x.half())
    with pytest.raises(TypeError, match=r"^dtype: torch.float16"):
        make(dtype=torch.float16)
    layer = make()
    with pytest.raises(TypeError, match=r"^w_down: dtype torch.float16"):
        layer.half()(x.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_W4_under_autocast_the_weights_dtype_is_the_precision(dtype, input_dtype):
    layer = make(dtype=dtype)
    x = torch.randn(4, 12).to(input_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, routing = layer(x, return_routing=True)
    assert y.dtype == dtype and routing.logits.dtype == torch.float32
    same = layer(x.to(dtype), topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
    assert same_bits(y, same)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(y.float().sum()).backward()
    assert x.grad.dtype == input_dtype and layer.w_gate.grad.dtype == dtype
    scaler.step(torch.optim.SGD(layer.parameters(), lr=0.1))
    scaler.update()


def test_W4_compute_dtype():
    layer = make(compute_dtype=torch.bfloat16)  # fp32 master weights
    x = torch.randn(4, 12, requires_grad=True)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.w_gate.grad.dtype == torch.float32 and x.grad.dtype == torch.float32


def test_presets():
    preset = mok.models.PRESETS["qwen3.5-35b-a3b"]
    layer = mok.MoELayer.from_preset("qwen3.5-35b-a3b", device="meta", dtype=torch.bfloat16)
    assert layer.w_gate.shape == (256, 512, 2048) and layer.w_down.shape == (256, 2048, 512)
    assert layer.shared_gate_vector.shape == (1, 2048) and layer.topk == preset.topk
    small = mok.MoELayer.from_preset(
        "deepseek-v3", hidden=16, intermediate=8, shared_intermediate=8, experts=16
    )
    y, routing = small(torch.randn(5, 16), return_routing=True)
    assert y.isfinite().all() and small.router_bias.shape == (16,)
    torch.testing.assert_close(routing.topk_weights.sum(-1), torch.full((5,), 2.5))
    with pytest.raises(ValueError, match="name: no preset 'gpt-5'; there are mixtral-8x7b"):
        mok.MoELayer.from_preset("gpt-5")


def test_bad_arguments_are_named():
    for error, name, settings in (
        (ValueError, "hidden", {"hidden": 0}),
        (ValueError, "intermediate", {"intermediate": -1}),
        (ValueError, "experts", {"experts": 0}),
        (ValueError, "topk", {"topk": 5}),
        (ValueError, "topk", {"topk": 0}),
        (ValueError, "topk", {"experts": 128, "topk": 65}),
        (ValueError, "shared_intermediate", {"shared_intermediate": -1}),
        (ValueError, "shared_gate", {"shared_gate": True}),
        (ValueError, "layout", {"layout": "x"}),
        (TypeError, "dtype", {"dtype": torch.int32}),
        (TypeError, "compute_dtype", {"compute_dtype": torch.float16}),
        (ValueError, "groups", {"router": mok.RouterConfig(groups=3)}),
    ):
        with pytest.raises(error, match=f"^{name}"):
            make(**settings)
    layer = make()
    x, ones = torch.randn(4, 12), torch.ones(4, 1)

    def given(ids, weights):
        return layer(x, topk_ids=ids, topk_weights=weights)

    for error, name, call in (
        (ValueError, "x", lambda: layer(x[:, :5])),
        (TypeError, "token_mask", lambda: layer(x, token_mask=torch.ones(4))),
        (ValueError, "token_mask", lambda: layer(x, token_mask=torch.ones(3) > 0)),
        (ValueError, "topk_ids", lambda: given(torch.full((4, 1), 4), ones)),
        (ValueError, "topk_weights", lambda: given(torch.full((4, 1), 0), torch.ones(4, 2))),
        (TypeError, "topk_ids", lambda: given(torch.zeros(4, 1), ones)),
        (TypeError, "topk_weights", lambda: given(torch.full((4, 1), 0), ones.bfloat16())),
    ):
        with pytest.raises(error, match=rf"^(mok \[bad routing\]: )?{name}"):
            call()
        assert layer(x).isfinite().all()  # the next good call works


def test_copies_and_state_dicts():
    layer = make(router=mok.RouterConfig("sigmoid", bias=True))
    twin = copy.deepcopy(layer)
    x = torch.randn(3, 12)
    assert same_bits(layer(x), twin(x))
    other = mok.MoELayer(12, 6, 4, 2, router=mok.RouterConfig("sigmoid", bias=True))
    assert not torch.equal(other.w_gate, layer.w_gate)
    other.load_state_dict(layer.state_dict())
    assert same_bits(layer(x), other(x))
    assert "hidden=12" in repr(layer)
