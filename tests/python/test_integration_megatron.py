"""Megatron-Core's MoE layers computed by mok: its own where it is installed, else stand-ins."""

import importlib
import importlib.util
import sys
import types
from types import SimpleNamespace

import mok
import pytest
import ranks
import torch
import torch.nn.functional as F
from mok.integrations import megatron as integration
from problems import problem
from torch import nn

TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
INSTALLED = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(not INSTALLED, reason="megatron-core is not installed")


def close(a, b, dtype=torch.float32):
    a, b = a.detach().double(), b.detach().double()
    return a.shape == b.shape and (a - b).norm() <= TOLERANCE[dtype] * b.norm()


# ---- routes and weights ----------------------------------------------------------------------


def test_routes():
    probs = torch.rand(5, 7, requires_grad=True)
    routing_map = torch.zeros(5, 7, dtype=torch.bool)
    wanted = [[0, 3], [6, -1], [-1, -1], [1, 2], [0, 6]]
    for t, row in enumerate(wanted):
        for e in row:
            if e >= 0:
                routing_map[t, e] = True
    ids, weights = integration.routes_of_map(probs, routing_map, 2)
    assert ids.tolist() == wanted
    weights.sum().backward()
    assert torch.equal(probs.grad, routing_map.float())
    for (t, k), e in zip(torch.cartesian_prod(torch.arange(5), torch.arange(2)),
                         ids.flatten().tolist(), strict=True):  # fmt: skip
        assert weights[t, k] == (probs[t, e] if e >= 0 else 0)
    ids, weights = integration.routes_of_map(probs.bfloat16(), routing_map.int(), 2)
    assert ids.tolist() == wanted and weights.dtype == torch.float32


CONFIG = {
    "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
    "moe_apply_probs_on_input": False, "moe_latent_size": None, "glu_linear_offset": 0.0,
    "moe_router_topk": 2, "activation_func_clamp_value": None, "fp8": None,
    "gradient_accumulation_fusion": False, "moe_megakernel_backend": "mok",
}  # fmt: skip


def linear(*weights, single=False):
    module = nn.Module()
    for i, weight in enumerate(weights):
        module.register_parameter("weight" if single else f"weight{i}", nn.Parameter(weight))
    return module


def experts_of(kind, p):
    """A module laid out as Megatron's, of the problem's weights."""
    both = torch.cat([p.weights.gate, p.weights.up], 1)
    down = p.weights.down
    experts = nn.Module()
    if kind == "SequentialMLP":
        experts.local_experts = nn.ModuleList()
        for one, two in zip(both, down, strict=True):
            expert = nn.Module()
            expert.linear_fc1 = linear(one.clone(), single=True)
            expert.linear_fc2 = linear(two.clone(), single=True)
            experts.local_experts.append(expert)
    elif kind == "TEGroupedMLP":
        experts.linear_fc1 = linear(*(w.clone() for w in both))
        experts.linear_fc2 = linear(*(w.clone() for w in down))
    elif kind == "in one buffer":
        experts.linear_fc1 = linear(*both.clone())
        experts.linear_fc2 = linear(*down.clone())
    elif kind == "one parameter":
        experts.linear_fc1 = linear(both.clone(), single=True)
        experts.linear_fc2 = linear(down.clone(), single=True)
    else:  # GroupedMLP, which views its weights as [E, H, 2I] and [E, I, H]
        hidden = p.x.shape[1]
        experts.weight1 = nn.Parameter(both.mT.contiguous().view(hidden, -1))
        experts.weight2 = nn.Parameter(down.mT.contiguous().view(-1, hidden))
    return experts


KINDS = ("SequentialMLP", "TEGroupedMLP", "in one buffer", "one parameter", "GroupedMLP")


def dense(p):
    """The problem's routing as Megatron has it."""
    tokens, experts = len(p.x), p.experts
    probs = torch.zeros(tokens, experts, device=p.x.device)
    routing_map = probs.bool()
    for t, row in enumerate(p.ids.tolist()):
        for k, e in enumerate(row):
            if e >= 0:
                probs[t, e] = p.topk_weights[t, k]
                routing_map[t, e] = True
    return probs, routing_map


def wanted(p, shared=()):
    leaves = [t.detach().clone().requires_grad_() for t in (
        p.x, p.topk_weights, p.weights.gate, p.weights.up, p.weights.down, *shared)]  # fmt: skip
    y = mok.moe(leaves[0], p.ids, *leaves[1:], swiglu_limit=p.limit)
    y.backward(p.d_y)
    return y, [leaf.grad for leaf in leaves]


def as_weights(kind, p, grads):
    """Gradients of an experts module's parameters as (gate_up [E, 2I, H], down)."""
    experts, hidden = p.experts, p.x.shape[1]
    if kind == "GroupedMLP":
        return grads[0].view(experts, hidden, -1).mT, grads[1].view(experts, -1, hidden).mT
    if kind == "one parameter":
        return grads
    if kind == "SequentialMLP":
        return torch.stack(grads[0::2]), torch.stack(grads[1::2])
    return torch.stack(grads[:experts]), torch.stack(grads[experts:])


@pytest.fixture
def boundary(monkeypatch):
    """The factory's module of Megatron's megakernel boundary, or stand-ins of its names."""
    base = "megatron.core.transformer.moe.megakernel"
    try:
        return importlib.import_module(f"{base}.factory")
    except ImportError:
        pass

    class MegakernelBackend(nn.Module):
        pass

    def build_megakernel_backend(*, config, **arguments):
        return config.moe_megakernel_backend

    parents = base.split(".")
    names = [".".join(parents[: i + 1]) for i in range(len(parents))]
    for name in (*names, f"{base}.backend", f"{base}.factory"):
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
    sys.modules[f"{base}.backend"].MegakernelBackend = MegakernelBackend
    factory = sys.modules[f"{base}.factory"]
    factory.build_megakernel_backend = build_megakernel_backend
    sys.modules[base].factory = factory
    user = types.ModuleType("megatron.core.user_of_the_boundary")  # imports it by name
    user.build_megakernel_backend = build_megakernel_backend
    monkeypatch.setitem(sys.modules, user.__name__, user)
    return factory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_backend(kind, dtype, boundary):
    check_backend(kind, problem(31, shared=6, shared_gate=True, limit=2.0, dtype=dtype), boundary)


def check_backend(kind, p, boundary):
    """Of a problem with a gated shared expert and a limit of 2."""
    w, dtype = p.weights, p.x.dtype
    experts = experts_of(kind, p)
    shared = nn.Module()
    shared.linear_fc1 = linear(torch.cat([w.shared_gate, w.shared_up]), single=True)
    shared.linear_fc2 = linear(w.shared_down, single=True)
    shared.use_shared_expert_gate, shared.gate_weight = True, nn.Parameter(w.gate_vector)
    config = SimpleNamespace(**{**CONFIG, "activation_func_clamp_value": 2.0})
    integration.install()
    integration.install()  # once is enough
    backend = boundary.build_megakernel_backend(
        config=config, ep_group=None, routed_experts=experts, shared_experts=shared,
        num_local_experts=p.experts,
    )  # fmt: skip
    if (user := sys.modules.get("megatron.core.user_of_the_boundary")) is not None:
        assert user.build_megakernel_backend is boundary.build_megakernel_backend
    assert not backend.state_dict() and backend.sharded_state_dict() == {}
    assert len(list(backend.parameters())) == len([*experts.parameters(), *shared.parameters()])

    probs, routing_map = dense(p)
    x = p.x.clone().view(len(p.x), 1, -1).requires_grad_()
    probs.requires_grad_()
    y = backend(x, probs, routing_map)
    y.backward(p.d_y.view(y.shape))
    want, grads = wanted(p, (w.shared_gate, w.shared_up, w.shared_down, w.gate_vector))
    assert close(y.view(want.shape), want, dtype)
    assert close(x.grad.view(want.shape), grads[0], dtype)
    slots = (p.ids >= 0).nonzero(as_tuple=True)
    assert close(probs.grad[slots[0], p.ids[slots]], grads[1][slots], dtype)
    got = as_weights(kind, p, [q.grad for q in experts.parameters()])
    assert close(got[0], torch.cat(grads[2:4], 1), dtype)
    assert close(got[1], grads[4], dtype)
    assert close(shared.linear_fc1.weight.grad, torch.cat(grads[5:7]), dtype)
    assert close(shared.gate_weight.grad, grads[8], dtype)

    config.moe_megakernel_backend = "another"
    if boundary.__spec__ is None:  # a stand-in
        assert boundary.build_megakernel_backend(config=config) == "another"


@pytest.mark.parametrize("kind", ["in one buffer", "one parameter", "TEGroupedMLP"])
def test_main_grad(kind, boundary):
    check_main_grad(kind, problem(32, dtype=torch.bfloat16))


def check_main_grad(kind, p):
    experts = experts_of(kind, p)
    parameters = list(experts.parameters())
    count = len(parameters) // 2
    for some in (parameters[:count], parameters[count:]):
        buffer = torch.ones((len(some), *some[0].shape), device=p.x.device)
        for parameter, main_grad in zip(some, buffer, strict=True):
            parameter.main_grad = main_grad
            parameter.grad_added_to_main_grad = False
    config = SimpleNamespace(**{**CONFIG, "gradient_accumulation_fusion": True})
    backend = integration.build_backend(
        config=config, ep_group=None, routed_experts=experts, shared_experts=None,
        num_local_experts=p.experts,
    )  # fmt: skip
    seen = []
    for parameter in parameters:  # as Megatron's hook, which runs when a gradient has arrived
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, parameter=parameter: seen.append(parameter))
        parameter.node = node
    for _ in range(2):
        backend(p.x, *dense(p)).backward(p.d_y)
        for parameter in parameters:
            assert parameter.grad is not None and parameter.grad_added_to_main_grad
            parameter.grad, parameter.grad_added_to_main_grad = None, False
    assert len(seen) == 2 * len(parameters)
    _, grads = wanted(p)
    got = [torch.stack([q.main_grad for q in some]) if count > 1 else some[0].main_grad
           for some in (parameters[:count], parameters[count:])]  # fmt: skip
    assert close((got[0] - 1) / 2, torch.cat(grads[2:4], 1), torch.bfloat16)
    assert close((got[1] - 1) / 2, grads[4], torch.bfloat16)


def test_what_is_refused(boundary):
    p = problem(33)
    experts = experts_of("one parameter", p)
    for name, value in (
        ("gated_linear_unit", False),
        ("activation_func", F.gelu),
        ("add_bias_linear", True),
        ("moe_apply_probs_on_input", True),
        ("fp8", "hybrid"),
        ("moe_mlp_glu_interleave_size", 32),
    ):
        config = SimpleNamespace(**{**CONFIG, name: value})
        with pytest.raises(ValueError, match=name):
            integration.build_backend(config=config, ep_group=None, routed_experts=experts,
                                      shared_experts=None, num_local_experts=6)  # fmt: skip
    with pytest.raises(ValueError, match="no known layout"):
        integration.expert_weights(nn.Linear(2, 2), 1)


# ---- Megatron itself -------------------------------------------------------------------------


def layer_of_megatron(dtype, ep, device):
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    if device == "cpu":
        torch.cuda.current_device = lambda: torch.device("cpu")  # the router asks for it
    if not hasattr(moe_utils, "te_general_gemm"):  # without Transformer Engine
        moe_utils.te_general_gemm = None
    assert dist.is_initialized()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=2, num_moe_experts=6, moe_router_topk=2,
        moe_ffn_hidden_size=64, ffn_hidden_size=64, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, use_cpu_initialization=True, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather", params_dtype=dtype, bf16=dtype == torch.bfloat16,
        moe_shared_expert_intermediate_size=64, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, expert_model_parallel_size=ep,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=6, moe_grouped_gemm=False)
    return MoELayer(config, spec.submodules).to(device)


def on_megatron(rank, dtype, device="cpu"):
    """Names of what differs with mok."""
    import torch.distributed as dist

    torch.manual_seed(3)
    layer = layer_of_megatron(dtype, dist.get_world_size(), device)
    names = list(layer.state_dict())
    x = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(rank)).to(device, dtype)

    def step():
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        y, bias = layer(leaf)
        assert bias is None
        y.float().square().sum().backward()
        return {"y": y, "x": leaf.grad, **{n: p.grad for n, p in layer.named_parameters()}}

    want = step()
    assert integration.replace_moe_layers(layer, max_tokens=10) is layer
    got = step()
    assert list(layer.state_dict()) == names
    sharded = layer.sharded_state_dict()
    assert any("experts" in name for name in sharded)
    return [name for name in want if not (want[name] is got[name] is None)
            and not close(got[name], torch.zeros_like(got[name])
                          if want[name] is None else want[name], dtype)]  # fmt: skip


@needs_megatron
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_layer_of_megatron(dtype, ep):
    assert ranks.run(ep, on_megatron, dtype, timeout=250) == [[]] * ep


@needs_megatron
def test_install_says_what_to_do_without_the_boundary():
    try:
        import megatron.core.transformer.moe.megakernel  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="replace_moe_layers"):
            integration.install()
