"""torch.compile, fake tensors, opcheck."""

import mok
import pytest
import torch
from problems import assert_same_bits, leaves, problem, same_bits
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from reference import Weights

GROUPS = []


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    while GROUPS:
        GROUPS.pop().close()


def operands(p, precision=None):
    """Arguments of torch.ops.mok.forward, with a workspace made for them."""
    group = mok.new_group()
    fp8 = None
    if precision is not None:
        fp8 = list(mok.quantize_weights(precision, *p.weights.each()[:3]))
    mok.moe(p.x, p.ids, p.topk_weights, *p.weights.each(), precision=precision, group=group)
    GROUPS.append(group)
    ((handle, rows, _),) = group._workspaces.values()
    return [p.x, p.ids, p.topk_weights, *p.weights.each(), *(None,) * 7, handle, rows, 0, fp8]


PROBLEMS = {
    "plain bf16": {"dtype": torch.bfloat16},
    "gated shared fp32": {"shared": 5, "shared_gate": True, "dtype": torch.float32, "hidden": 22},
    "shared fp64": {"shared": 5, "hidden": 26},
}


# PyTorch's test_schema compares arguments, which it cannot do of float8.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_K2_opcheck_quantized(precision):
    p = problem(1, dtype=torch.bfloat16)
    arguments = operands(p, precision)
    outputs = torch.ops.mok.forward(*arguments)
    arguments[-3] = 0
    torch.library.opcheck(torch.ops.mok.forward.default, arguments, test_utils=WITHOUT_SCHEMA)
    fp8 = [*arguments[-1][:4], *arguments[-1][6:]]
    backward = [p.d_y, *arguments[:10], *outputs[1:], arguments[-4], 0, 511, fp8]
    torch.library.opcheck(torch.ops.mok.backward.default, backward, test_utils=WITHOUT_SCHEMA)


@pytest.mark.parametrize("settings", PROBLEMS)
def test_K2_opcheck_forward(settings):
    p = problem(1, **PROBLEMS[settings])
    arguments = operands(p)
    for ids in (p.ids, p.ids.int()):
        arguments[1] = ids
        torch.library.opcheck(
            torch.ops.mok.forward.default, arguments,
            # Rows that are kept but have no token hold anything; so no comparison of all outputs.
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )  # fmt: skip
    arguments[-3] = 0
    torch.library.opcheck(torch.ops.mok.forward.default, arguments)
    with_grad = [
        t.detach().requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t
        for t in arguments
    ]
    torch.library.opcheck(torch.ops.mok.forward.default, with_grad)


@pytest.mark.parametrize("needs", [511, 0b000000100, 0b101010101])
def test_K2_opcheck_backward(needs):
    p = problem(2, shared=5, shared_gate=True, hidden=28, dtype=torch.bfloat16)
    arguments = operands(p)
    outputs = torch.ops.mok.forward(*arguments)
    backward = [p.d_y, *arguments[:10], *outputs[1:], arguments[-4], 0, needs, None]
    torch.library.opcheck(torch.ops.mok.backward.default, backward)
    main = [
        None if w is None or i % 2 else torch.zeros(w.shape) for i, w in enumerate(arguments[3:10])
    ]
    torch.library.opcheck(
        torch.ops.mok.backward_accumulate.default, (*backward, *main),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_K2_opcheck_of_the_eager_operators():
    p = problem(2, shared=5, shared_gate=True, hidden=28, dtype=torch.bfloat16)
    arguments = operands(p)
    workspace, rows, layout, fp8 = arguments[-4:]
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    forward, backward = torch.ops.mok.forward_eager, torch.ops.mok.backward_eager
    for keep, saved_rows in ((False, 0), (True, 0), (True, rows)):
        settings = (*arguments[:10], workspace, keep, saved_rows, layout, fp8)
        # Rows that are kept but have no token hold anything; so no comparison of their values.
        if saved_rows == 0:
            torch.library.opcheck(forward.default, settings, **checks)
        y, *kept = forward(*settings)
        same_bits(y, torch.ops.mok.forward(*arguments)[0])
        assert [t is not None for t in kept] == [keep, saved_rows > 0]
    settings = (p.d_y, *arguments[:10], *kept, workspace, layout, 0b101010101, fp8)
    torch.library.opcheck(backward.default, settings, **checks)
    main = [torch.zeros(w.shape) if i % 2 else None for i, w in enumerate(arguments[3:10])]
    torch.library.opcheck(
        torch.ops.mok.backward_accumulate_eager.default, (*settings, *main), **checks
    )


def test_K2_opcheck_select_experts():
    for arguments in ((torch.randn(5, 8), 3, 1, 1, "top2"), (torch.randn(0, 8), 8, 1, 1, "top2"),
                      (torch.randn(5, 8).double(), 2, 4, 2, "max")):  # fmt: skip
        torch.library.opcheck(torch.ops.mok.select_experts.default, arguments)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_K2_fake_tensors_with_symbolic_tokens(ids):
    p = problem(3, shared=5, shared_gate=True, hidden=30, dtype=torch.bfloat16)
    arguments = operands(p)
    arguments[1] = p.ids.to(ids)
    real = torch.ops.mok.forward(*arguments)
    environment = ShapeEnv()
    tokens = environment.create_symintnode(
        environment.create_symbol(13, ConstantSource("T"), DimDynamic.DYNAMIC), hint=13
    )
    with FakeTensorMode(shape_env=environment):
        fake = [
            None if t is None else
            torch.empty((tokens, *t.shape[1:]) if i < 3 else t.shape, dtype=t.dtype)
            for i, t in enumerate(arguments[:10])
        ]  # fmt: skip
        outputs = torch.ops.mok.forward(*fake, *arguments[10:])
        grads = torch.ops.mok.backward(outputs[0], *fake, *outputs[1:], arguments[-4], 0, 511, None)
    assert isinstance(outputs[0].shape[0], torch.SymInt)
    for got, want in zip(outputs, real, strict=True):
        assert [int(s) for s in got.shape] == list(want.shape) and got.dtype == want.dtype
    for got, want in zip(grads, (p.x, p.topk_weights, *arguments[3:10]), strict=True):
        assert [int(s) for s in got.shape] == list(want.shape) and got.dtype == want.dtype


def compiled_equals_eager(function, inputs, backend, dynamic=None):
    eager = [t.detach().clone().requires_grad_() for t in inputs]
    want = function(*eager)
    want.float().square().sum().backward()
    mine = [t.detach().clone().requires_grad_() for t in inputs]
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    got = compiled(*mine)
    got.float().square().sum().backward()
    assert same_bits(got, want)
    for a, b in zip(mine, eager, strict=True):
        assert same_bits(a.grad, b.grad)
    return compiled


@pytest.mark.parametrize("settings", PROBLEMS)
def test_compiled_moe_has_the_same_bits(settings):
    p = problem(4, **PROBLEMS[settings])
    given = [t for t in (p.x, p.topk_weights, *p.weights.each()) if t is not None]

    def function(x, w, *weights):
        return mok.moe(x, p.ids, w, *weights)

    compiled_equals_eager(function, given, "aot_eager")


@pytest.mark.parametrize("layout", ["split", "stacked"])
def test_compiled_layer(layout):
    """Router, shared expert, token mask and what the layer returns; the whole in one graph."""
    layer = mok.MoELayer(16, 8, 4, 2, shared_intermediate=6, shared_gate=True, layout=layout,
                         router=mok.RouterConfig("sigmoid", bias=True, groups=2))  # fmt: skip
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 16)
    mask = torch.rand(2, 5) < 0.8
    results = []
    for function in (layer, compiled):
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        y, routing = function(mine, token_mask=mask, return_routing=True)
        loss = y.square().sum() + mok.load_balancing_loss(
            routing.probabilities, routing.counts, mask
        )
        loss.backward()
        results.append(
            [y, routing.counts, routing.topk_ids, mine.grad, *(p.grad for p in layer.parameters())]
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        assert same_bits(compiled(x), layer(x))


def test_inductor():
    """The default backend, once: T changes without a graph per shape."""
    layer = mok.MoELayer(16, 8, 4, 2)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (5, 17, 33, 60):
        x = torch.randn(tokens, 16)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(a).sum().backward()
        layer(b).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_graph_outlives_reserve():
    group = mok.new_group(max_tokens=16)
    layer = mok.MoELayer(16, 8, 4, 2, group=group)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 16)
    want = compiled(x)
    group.reserve(64)
    assert same_bits(compiled(x), want)
    compiled(torch.randn(60, 16)).sum().backward()


def test_compiled_with_frozen_weights_and_inputs():
    layer = mok.MoELayer(16, 8, 4, 2)
    layer.w_gate.requires_grad_(False)
    layer.w_up.requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(5, 16)).sum().backward()
    assert layer.w_gate.grad is None and layer.w_down.grad is not None


def test_compiled_main_grad():
    p = problem(5, dtype=torch.bfloat16)
    results = []
    for compile_it in (False, True):
        tensors = leaves(p)
        for t in tensors[2:5]:
            t.main_grad = torch.zeros(t.shape)

        def function(x, w, gate, up, down):
            return mok.moe(x, p.ids, w, gate, up, down, accumulate=True)

        if compile_it:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            function(*tensors[:5]).backward(p.d_y)
        assert all(t.grad is None for t in tensors[2:5])
        results.append((p.x, tensors[0].grad, tensors[1].grad,
                        Weights(*(t.main_grad for t in tensors[2:5]))))  # fmt: skip
    assert_same_bits(*results)
