"""One process, one GPU: graphs, compiling, checkpointing, precision, accumulation, memory."""

import mok
import pytest
import torch
from gpu_problems import DEVICE, gpu_problem, overwrite
from problems import assert_same_bits, leaves, run, same_bits
from torch.utils.checkpoint import checkpoint

from reference import Weights, error


def layer_and_input(tokens=50, **settings):
    torch.manual_seed(0)
    settings = {"dtype": torch.bfloat16, "device": DEVICE, **settings}
    layer = mok.MoELayer(128, 64, 8, 2, shared_intermediate=64, **settings)
    return layer, torch.randn(tokens, 128, device=DEVICE, dtype=torch.bfloat16)


def gradients(layer, x, function=None):
    """[y, d_x, gradients of all parameters]."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x) if function is None else function(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def assert_equal(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)


def test_layer_is_that_of_the_cpu():
    layer, x = layer_and_input(shared_gate=True, swiglu_limit=2.0)
    host = mok.MoELayer(128, 64, 8, 2, shared_intermediate=64, shared_gate=True, swiglu_limit=2.0,
                        dtype=torch.bfloat16)  # fmt: skip
    host.load_state_dict({n: t.cpu() for n, t in layer.state_dict().items()})
    got, want = gradients(layer, x), gradients(host, x.cpu())
    names = ["y", "d_x", *(n for n, _ in layer.named_parameters())]
    for name, a, b in zip(names, got, want, strict=True):
        # A router logit that differs in its last bit may choose another expert: on the whole.
        a, b = a.float().cpu(), b.float()
        assert (a - b).norm() < 3e-2 * b.norm(), name


def test_initial_values_on_the_gpu_depend_on_the_seed_alone():
    one, other = layer_and_input()[0], layer_and_input()[0]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert same_bits(a, b)
    assert 0.9 < one.w_gate.float().std().item() * 128**0.5 < 1.1


# ---- graphs ----------------------------------------------------------------------------------


def test_forward_and_backward_in_a_graph_with_changing_ids():
    ps = [gpu_problem(20 + i, tokens=300, shared=64, shared_gate=True) for i in range(3)]
    want = [run(p) for p in ps]
    static = gpu_problem(20, tokens=300, shared=64, shared_gate=True)
    tensors = leaves(static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up, as PyTorch's manual asks for
        for _ in range(2):
            mok.moe(tensors[0], static.ids, tensors[1], *tensors[2:]).backward(static.d_y)
    torch.cuda.current_stream().wait_stream(stream)
    for t in tensors:
        t.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mok.moe(tensors[0], static.ids, tensors[1], *tensors[2:])
        y.backward(static.d_y)
    for i in (1, 2, 0, 2):
        overwrite(static, tensors, ps[i])
        graph.replay()
        grads = [t.grad for t in tensors]
        assert_same_bits((y, grads[0], grads[1], Weights(*grads[2:])), want[i])
        assert_same_bits(run(ps[i]), want[i])  # a direct call between replays
    torch.cuda.synchronize()
    mok.synchronize()


def test_memory_is_not_taken_while_capturing():
    p = gpu_problem(23)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="make one call before"), torch.cuda.graph(graph):
        mok.moe(p.x, p.ids, p.topk_weights, *p.weights.each())
    assert_same_bits(run(p), run(p))


def test_make_graphed_callables():
    layer, x = layer_and_input(router=None)
    ids = torch.randint(8, (50, 2), device=DEVICE)
    weights = torch.rand(50, 2, device=DEVICE)

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, topk_ids=ids, topk_weights=weights)

    experts = Experts()
    want = gradients(experts, x)
    graphed = torch.cuda.make_graphed_callables(Experts(), (x.clone().requires_grad_(),))
    assert_equal(gradients(experts, x, graphed), want)


# ---- compiling -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_graph_breaks(backend):
    torch._dynamo.reset()
    p = gpu_problem(24)
    want = run(p)

    def function(x, ids, topk_weights, *weights):
        return mok.moe(x * 1.0, ids, topk_weights, *weights) * 1.0

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for _ in range(2):
        tensors = leaves(p)
        y = compiled(tensors[0], p.ids, tensors[1], *tensors[2:5])
        y.backward(p.d_y)
        grads = [None if t is None else t.grad for t in tensors]
        assert_same_bits((y, grads[0], grads[1], Weights(*grads[2:])), want)


def test_compile_the_whole_layer():
    torch._dynamo.reset()
    layer, x = layer_and_input()
    want = gradients(layer, x)
    got = gradients(layer, x, torch.compile(layer, fullgraph=True))
    for a, b in zip(got, want, strict=True):  # the router's sums may be of another order
        assert (a - b).float().norm() <= 2e-2 * b.float().norm()


# ---- checkpointing ---------------------------------------------------------------------------

WAYS = {
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "routing": {"use_reentrant": False, "context_fn": mok.checkpoint_policy()},
    "layer": {"use_reentrant": False, "context_fn": mok.checkpoint_policy("layer")},
}


@pytest.mark.parametrize("way", WAYS)
def test_checkpointing_changes_no_bit(way):
    layer, x = layer_and_input()
    want = gradients(layer, x)
    assert_equal(gradients(layer, x, lambda x: checkpoint(layer, x, **WAYS[way])), want)


def test_backward_without_saved_rows_changes_no_bit():
    p = gpu_problem(25, tokens=300, shared=64)
    group = mok.new_group(options=mok.Options(saved_rows=0))
    assert_same_bits(run(p, group), run(p))
    group.close()


# ---- modes -----------------------------------------------------------------------------------


def test_no_grad_and_inference_mode():
    layer, x = layer_and_input()
    want = gradients(layer, x)[0]
    with torch.no_grad():
        y = layer(x)
    assert same_bits(y, want) and y.grad_fn is None
    with torch.inference_mode():
        y = layer(x)
    assert same_bits(y, want) and y.is_inference()


def test_autocast_computes_in_the_weights_dtype():
    layer, x = layer_and_input()
    want = gradients(layer, x)[0]
    with torch.autocast("cuda", torch.float16):
        y = layer(x.float())
    assert y.dtype == torch.bfloat16 and same_bits(y, want)


def test_fp32_weights_with_bf16_products():
    layer, x = layer_and_input(dtype=torch.float32, compute_dtype=torch.bfloat16)
    got = gradients(layer, x)
    rounded, _ = layer_and_input(dtype=torch.float32, compute_dtype=torch.bfloat16)
    rounded.load_state_dict(layer.state_dict())
    experts = [n for n, _ in layer.named_parameters() if n != "router_weight"]
    low, _ = layer_and_input()
    low.load_state_dict(
        {n: t.bfloat16() if n in experts else t for n, t in layer.state_dict().items()}
    )
    want = gradients(low, x)
    assert same_bits(got[0], want[0]) and got[2].dtype == torch.float32
    assert same_bits(got[2].bfloat16(), want[2])


# ---- accumulation and memory -----------------------------------------------------------------


def test_main_grad_gets_the_sum_of_all_calls():
    layer, _ = layer_and_input(accumulate_into_main_grad=True)
    names = [n for n, _ in layer.named_parameters() if n != "router_weight"]
    weights = [getattr(layer, n) for n in names]
    for w in weights:
        w.main_grad = torch.zeros(w.shape, device=DEVICE)
    plain, _ = layer_and_input()
    plain.load_state_dict(layer.state_dict())
    sums = [torch.zeros(w.shape, device=DEVICE) for w in weights]
    before = [w.main_grad.clone() for w in weights]
    for i in range(3):
        x = torch.randn(40 + i, 128, device=DEVICE).bfloat16()
        layer(x).float().square().sum().backward()
        plain.zero_grad()
        plain(x).float().square().sum().backward()
        for s, n in zip(sums, names, strict=True):
            s += getattr(plain, n).grad.float()
    for n, w, s, b in zip(names, weights, sums, before, strict=True):
        assert w.grad is None and not same_bits(w.main_grad, b), n
        assert error(w.main_grad.flatten(0, -2), s.flatten(0, -2)) < 2e-2, n
    assert layer.router_weight.grad is not None


def test_a_thousand_steps_leave_memory_flat():
    layer, x = layer_and_input(tokens=200)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    group = mok.default_group()

    def step():
        optimizer.zero_grad()
        layer(x).float().square().mean().backward()
        optimizer.step()

    def memory():
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        return (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            group.memory_bytes(),
            free,
        )

    for _ in range(20):
        step()
    before = memory()
    for _ in range(1000):
        step()
    assert memory() == before
    mok.synchronize()
