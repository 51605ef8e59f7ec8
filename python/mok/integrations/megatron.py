"""Megatron-Core: its MoE layers, computed by mok. Parameters, routers and checkpoints stay its own.

Two ways, whichever the installed version allows:

* ``install()``, before the model is built: versions with a megakernel boundary (the option
  ``moe_megakernel_backend``) then build mok for ``"mok"``.
* ``replace_moe_layers(model)``, after it is built: in every ``MoELayer`` the token dispatcher and
  the experts' forward give way to mok. Shared experts stay Megatron's own.

Weights: SequentialMLP, TEGroupedMLP (a parameter an expert, or one for all) and GroupedMLP. Where
experts are parameters of their own they are copied together at each call, unless they lie in one
buffer at equal distances. With ``gradient_accumulation_fusion`` the fp32 sums go into ``main_grad``
where that lies so too; else gradients come in the parameters' dtype, for Megatron to add.

All ranks of an expert-parallel group are on one machine, and expert tensor parallelism is 1.
"""

import sys
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mok.autograd import moe
from mok.group import Group, local_group, new_group
from mok.integrations._stack import stacked

_BACKEND = "mok"


# ---- routes ----------------------------------------------------------------------------------


def routes_of_map(probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Megatron's dense routing as ids and weights.

    Args:
        probs: [T, E], floating point.
        routing_map: bool [T, E], at most K a row.

    Returns: ids int64 [T, K], ascending, -1 where a row has fewer; weights fp32 [T, K] (fp64 for
        fp64), differentiable, 0 there. Looks at no value on the host.
    """
    experts = probs.shape[-1]
    descending = torch.arange(experts, 0, -1, device=probs.device)
    best = torch.where(routing_map.bool(), descending, 0).topk(topk, dim=-1).values
    ids = torch.where(best > 0, experts - best, -1)
    weights = probs if probs.dtype == torch.float64 else probs.float()
    weights = weights.gather(-1, ids.clamp_min(0))
    return ids, torch.where(ids >= 0, weights, 0.0)


# ---- weights ---------------------------------------------------------------------------------


def _parameters_of(experts: nn.Module):
    """(kind, first products' parameters, second products')."""
    if hasattr(experts, "local_experts"):  # SequentialMLP
        return (
            "each",
            [e.linear_fc1.weight for e in experts.local_experts],
            [e.linear_fc2.weight for e in experts.local_experts],
        )
    if hasattr(experts, "linear_fc1"):  # TEGroupedMLP
        fc1, fc2 = experts.linear_fc1, experts.linear_fc2
        if isinstance(getattr(fc1, "weight", None), nn.Parameter) and fc1.weight.dim() == 3:
            return "all", [fc1.weight], [fc2.weight]
        count = sum(name.removeprefix("weight").isdigit() for name, _ in fc1.named_parameters())
        return (
            "each",
            [getattr(fc1, f"weight{i}") for i in range(count)],
            [getattr(fc2, f"weight{i}") for i in range(count)],
        )
    if hasattr(experts, "weight1"):  # GroupedMLP: [H, E * 2I], [E * I, H]
        return "transposed", [experts.weight1], [experts.weight2]
    raise ValueError(f"experts: {type(experts).__name__} is of no known layout")


def expert_weights(experts: nn.Module, count: int, accumulate: bool = False):
    """(w_gate_up [E_local, 2I, H], w_down [E_local, H, I]) of a Megatron experts module."""
    kind, first, second = _parameters_of(experts)
    if kind == "each":
        return stacked(first, accumulate), stacked(second, accumulate)
    if kind == "all":
        return tuple(_whole(w[0]) if accumulate else w[0] for w in (first, second))
    hidden = first[0].shape[0]
    return (
        first[0].view(count, hidden, -1).transpose(1, 2),
        second[0].view(count, -1, hidden).transpose(1, 2),
    )


def _whole(parameter: nn.Parameter) -> Tensor:
    """A parameter for all experts; with its main_grad, as one tensor to accumulate into."""
    whole = stacked([parameter], True)
    view = whole[0]
    if hasattr(whole, "main_grad"):
        view.main_grad = whole.main_grad[0]
    return view


def _why_not(config) -> str | None:
    """What of a TransformerConfig mok does not compute."""
    wanted = (
        ("gated_linear_unit", True),
        ("activation_func", F.silu),
        ("add_bias_linear", False),
        ("moe_apply_probs_on_input", False),
        ("moe_latent_size", None),
        ("glu_linear_offset", 0.0),
        ("moe_mlp_glu_interleave_size", None),
        ("moe_pad_expert_input_to_capacity", False),
        ("expert_tensor_parallel_size", 1),
        ("fp8", None),
        ("fp4", None),
    )
    for name, value in wanted:
        have = getattr(config, name, value)
        if have != value and not (value is None and not have):
            return f"{name}={have!r}, expected {value!r}"
    return None


def _routed(config, group, experts, count, x, probs, routing_map, shared=(None,) * 4):
    """y [T, H] of x [T, H], probs and routing_map [T, E]."""
    ids, weights = routes_of_map(probs, routing_map, config.moe_router_topk)
    fused = bool(getattr(config, "gradient_accumulation_fusion", False)) and torch.is_grad_enabled()
    gate_up, down = expert_weights(experts, count, fused)
    accumulate = all(hasattr(w, "main_grad") for w in (gate_up, down))
    return moe(
        x, ids, weights, gate_up, None, down, *shared, layout="stacked",
        swiglu_limit=getattr(config, "activation_func_clamp_value", None), group=group,
        accumulate=accumulate,
        accumulate_from=(gate_up, None, down, None, None, None, None) if accumulate else None,
    )  # fmt: skip


# ---- experts and dispatcher ------------------------------------------------------------------


class Dispatcher:
    """In place of a token dispatcher of Megatron: passes tokens and routes through."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor):
        self._shape = hidden_states.shape
        self._routing_map = routing_map.reshape(-1, routing_map.shape[-1])
        return hidden_states.reshape(-1, self._shape[-1]), probs.reshape(self._routing_map.shape)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor):
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor):
        return hidden_states, self._routing_map, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *_) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self._shape)


def group_of(process_group, max_tokens: int | None) -> Group:
    """A mok group of the ranks of an expert-parallel process group; collective among them."""
    if process_group is None or torch.distributed.get_world_size(process_group) == 1:
        return local_group(max_tokens=max_tokens)
    return new_group(process_group, max_tokens=max_tokens)


_groups: dict = {}  # process group -> those made of it, smallest T_max first


def _group_for(process_group, tokens: int) -> Group:
    """One for all layers, large enough; collective where it is made. Ranks have equal tokens."""
    made = _groups.setdefault(process_group, [])
    if not made or made[-1].max_tokens < tokens:
        made.append(group_of(process_group, tokens))  # a backward may still need the last one
    return made[-1]


def replace_moe_layers(model: nn.Module, *, max_tokens: int | None = None) -> nn.Module:
    """Lets mok compute the routed experts of every MoELayer of a model; changes it in place.

    Collective over each expert-parallel group. Parameters, their names and checkpoints stay. Not
    together with Megatron's overlapped parameter gathering, whose hooks the experts' inner
    modules would not run.

    Args:
        max_tokens: the most tokens of any rank in a call (sequence length times micro-batch size);
            needed with more than one expert-parallel rank.

    Returns: the model.

    Raises:
        ValueError: there is no MoELayer, or one computes what mok does not (it is said what).
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layers = {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    if not layers:
        raise ValueError("model: it has no MoELayer")
    for name, layer in layers.items():
        why = _why_not(layer.config)
        if why is None and layer.shared_expert_overlap:
            why = "moe_shared_expert_overlap=True, expected False"
        if why is not None:
            raise ValueError(f"model: {name or 'itself'}: {why}")
        _parameters_of(layer.experts)
    groups: dict = {}
    for layer in layers.values():
        group = groups.get(layer.ep_group)
        if group is None:
            group = groups[layer.ep_group] = group_of(layer.ep_group, max_tokens)
        layer.token_dispatcher = Dispatcher()
        layer.experts._mok = (group, layer.num_local_experts)
        layer.experts.forward = types.MethodType(_experts_forward, layer.experts)
    return model


def _experts_forward(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor):
    group, count = self._mok
    return _routed(self.config, group, self, count, hidden_states, probs, routing_map), None


# ---- the megakernel boundary -----------------------------------------------------------------


def build_backend(*, config, ep_group, routed_experts, shared_experts, num_local_experts):
    """A megakernel backend; what Megatron's factory of that name returns.

    Raises ValueError for what mok does not compute (it is said what).
    """
    from megatron.core.transformer.moe.megakernel.backend import MegakernelBackend

    why = _why_not(config)
    if why is not None:
        raise ValueError(f"moe_megakernel_backend={_BACKEND!r}: {why}")
    _parameters_of(routed_experts)

    class MoKBackend(MegakernelBackend):
        def __init__(self):
            super().__init__()
            self.config = config
            self.num_local_experts = num_local_experts
            self._modules_of_megatron = (routed_experts, shared_experts)  # a tuple: not registered
            self._process_group = ep_group
            # Aliases, so that hooks that Megatron puts on a module with parameters run for this
            # one. named_parameters lists each parameter once.
            for module in (routed_experts, shared_experts):
                for parameter in module.parameters() if module is not None else ():
                    name = f"_alias{len(self._parameters)}"
                    self.register_parameter(name, parameter)

        def forward(self, hidden_states, probs, routing_map):
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            group = _group_for(self._process_group, x.shape[0])
            routed, shared = self._modules_of_megatron
            y = _routed(
                self.config, group, routed, self.num_local_experts, x,
                probs.reshape(x.shape[0], -1), routing_map.reshape(x.shape[0], -1),
                _shared_weights(shared),
            )  # fmt: skip
            return y.view(hidden_states.shape)

        # Megatron's modules own the parameters, in checkpoints too.
        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            return {}

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            pass

        def _load_from_state_dict(self, *_):
            pass

    return MoKBackend()


def _shared_weights(shared: nn.Module | None) -> tuple:
    if shared is None:
        return (None,) * 4
    both, down = shared.linear_fc1.weight, shared.linear_fc2.weight
    inner = down.shape[1]
    gate = shared.gate_weight if getattr(shared, "use_shared_expert_gate", False) else None
    return both[:inner], both[inner:], down, gate


def install() -> None:
    """Makes ``moe_megakernel_backend="mok"`` of Megatron mean this package's layer.

    Raises ImportError where the installed Megatron-Core has no megakernel boundary.
    """
    try:
        from megatron.core.transformer.moe.megakernel import factory
    except ImportError:
        raise ImportError(
            "mok: this Megatron-Core has no megakernel boundary (moe_megakernel_backend); use "
            "mok.integrations.megatron.replace_moe_layers(model) after the model is built"
        ) from None
    original = factory.build_megakernel_backend
    if getattr(original, "_mok", False):
        return

    def build_megakernel_backend(*, config, **arguments):
        if config.moe_megakernel_backend == _BACKEND:
            return build_backend(config=config, **arguments)
        return original(config=config, **arguments)

    build_megakernel_backend._mok = True
    for module in list(sys.modules.values()):  # also those that imported it by name
        if getattr(module, "__name__", "").startswith("megatron.core") and (
            vars(module).get("build_megakernel_backend") is original
        ):
            module.build_megakernel_backend = build_megakernel_backend
