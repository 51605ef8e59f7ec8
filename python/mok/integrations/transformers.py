"""Hugging Face transformers: the experts of a loaded model, computed by mok.

    model = AutoModelForCausalLM.from_pretrained(...)
    mok.integrations.transformers.replace_experts(model)

Parameters, their names and their values stay where they are, so that ``state_dict``,
``save_pretrained``, ``from_pretrained`` and optimisers see no difference. The router stays the
model's own, with its recorded logits and its auxiliary loss.

Two layouts are known: experts as fused 3-D parameters (transformers 5; any model whose experts are
SiLU-gated, without biases and not transposed: Qwen3-MoE, Mixtral, OLMoE, ...), and a ModuleList of
experts (transformers 4: Qwen3-MoE and Mixtral).
"""

import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mok.autograd import moe
from mok.group import Group, default_group
from mok.integrations._stack import adopt, stacked

# Class of a block with a ModuleList of experts -> names of an expert's gate, up and down.
_BLOCKS = {
    "Qwen3MoeSparseMoeBlock": ("gate_proj", "up_proj", "down_proj"),
    "MixtralSparseMoeBlock": ("w1", "w3", "w2"),
}


# ---- fused parameters ------------------------------------------------------------------------


def _is_fused(module: nn.Module) -> bool:
    names = ("gate_up_proj", "down_proj")
    return all(isinstance(getattr(module, n, None), nn.Parameter) for n in names) and (
        module.gate_up_proj.dim() == 3
    )


def _why_not_fused(experts: nn.Module) -> str | None:
    """What of a module with fused experts mok does not compute."""
    for name, right in (
        ("has_gate", True),
        ("has_bias", False),
        ("is_transposed", False),
        ("has_post_expert_norm", False),
        ("_is_expert_parallel", False),
    ):
        if getattr(experts, name, right) != right:
            return f"{name} is {getattr(experts, name)}"
    if (
        not isinstance(experts.act_fn, nn.SiLU)
        and type(experts.act_fn).__name__ != "SiLUActivation"
    ):
        return f"the activation is {type(experts.act_fn).__name__}, not SiLU"
    gating = getattr(type(experts), "_apply_gate", None)
    if gating is not None and gating.__name__ != "_default_apply_gate":
        return "it has a gating of its own"
    up, down = experts.gate_up_proj.shape, experts.down_proj.shape
    if up[1] != 2 * down[2] or up[2] != down[1]:
        return f"gate_up_proj {list(up)} and down_proj {list(down)} are not [E, 2I, H], [E, H, I]"
    return None


def _fused_forward(self, hidden_states, top_k_index, top_k_weights):
    """In place of the experts' forward: [T, H], [T, K], [T, K] -> [T, H]."""
    experts = self.num_experts
    ids = torch.where(top_k_index < experts, top_k_index, -1)  # beyond: a slot that goes nowhere
    concatenated = getattr(self, "is_concatenated", True)
    y = moe(
        hidden_states.reshape(-1, hidden_states.shape[-1]), ids, _as_sums(top_k_weights),
        self.gate_up_proj, None, self.down_proj,
        layout="stacked" if concatenated else "interleaved",
        group=getattr(self, "_mok_group", None),
    )  # fmt: skip
    return y.view(hidden_states.shape)


def _as_sums(weights):
    return weights if weights.dtype == torch.float64 else weights.float()


def register(name: str = "mok") -> None:
    """Makes mok an experts implementation of transformers 5, by that name.

    ``from_pretrained(..., experts_implementation="mok")`` or
    ``model.set_experts_implementation("mok")`` then use it, with the group of :func:`mok.init`,
    which must be of a single rank (else: :func:`replace_experts`).

    Raises ImportError where transformers has no such interface.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def forward(self, hidden_states, top_k_index, top_k_weights):
        why = _why_not_fused(self)
        if why is not None:
            raise ValueError(f"experts_implementation={name!r}: {type(self).__name__}: {why}")
        return _fused_forward(self, hidden_states, top_k_index, top_k_weights)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)


# ---- a ModuleList of experts -----------------------------------------------------------------


def _is_block(module: nn.Module) -> bool:
    listed = isinstance(getattr(module, "experts", None), nn.ModuleList)
    return listed and type(module).__name__ in _BLOCKS


def _why_not_block(block: nn.Module) -> str | None:
    for expert in block.experts:
        for name in _BLOCKS[type(block).__name__]:
            linear = getattr(expert, name, None)
            if type(linear) is not nn.Linear or linear.bias is not None:
                return f"an expert's {name} is no nn.Linear without bias"
        if not isinstance(expert.act_fn, nn.SiLU) and (
            type(expert.act_fn).__name__ != "SiLUActivation"
        ):
            return f"the activation is {type(expert.act_fn).__name__}, not SiLU"
    return None


def _matrices(block: nn.Module):
    """The gates, the ups and the downs of a block's experts."""
    experts = block.experts.values() if isinstance(block.experts, nn.ModuleDict) else block.experts
    experts = list(experts)
    return [[getattr(e, name).weight for e in experts] for name in _BLOCKS[type(block).__name__]]


def _block_forward(self, hidden_states):
    """In place of the block's forward: [B, S, H] -> ([B, S, H], router logits [B * S, E])."""
    noise = getattr(self, "jitter_noise", 0)
    if self.training and noise:
        factors = torch.empty_like(hidden_states).uniform_(1.0 - noise, 1.0 + noise)
        hidden_states = hidden_states * factors
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = self.gate(flat)
    weights, ids = F.softmax(logits, dim=-1, dtype=torch.float).topk(self.top_k, dim=-1)
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    gate, up, down = (stacked(each) for each in _matrices(self))
    if gate.dtype == torch.float64:
        weights = weights.double()
    y = moe(flat, ids, weights, gate, up, down, group=self._mok_group)
    return y.view(hidden_states.shape), logits


# ---- the model -------------------------------------------------------------------------------


def replace_experts(model: nn.Module, *, group: Group | None = None) -> nn.Module:
    """Lets mok compute every MoE block's experts of a model; changes it in place.

    With one rank the model's parameters stay as they are. With R ranks (all of them call this, with
    the whole model loaded) each keeps E / R experts of every block; ``load_state_dict`` still takes
    whole tensors, and :func:`gather_state_dict` gives them.

    Args:
        model: anything that holds blocks of a known layout.
        group: the EP group; default: that of :func:`mok.init`.

    Returns: the model.

    Raises:
        ValueError: there is no such block, one computes what mok does not (it is said what), or its
            experts cannot be shared evenly. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__}, expected a torch.nn.Module")
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group: {group!r} is no mok.Group")
    ranks = (group or default_group()).ranks
    fused = {name: m for name, m in model.named_modules() if _is_fused(m)}
    blocks = {name: m for name, m in model.named_modules() if _is_block(m)}
    if not fused and not blocks:
        raise ValueError("model: it has no MoE block of a known layout")
    for name, module in (*fused.items(), *blocks.items()):
        why = _why_not_fused(module) if name in fused else _why_not_block(module)
        experts = len(module.gate_up_proj if name in fused else module.experts)
        if why is None and experts % ranks:
            why = f"{experts} experts cannot be shared by {ranks} ranks"
        if why is not None:
            raise ValueError(f"model: {name} ({type(module).__name__}): {why}")
    for module in (*fused.values(), *blocks.values()):
        module._mok_group = group
        if ranks > 1:
            _keep_own(module, group or default_group())
    for module in fused.values():
        module.forward = types.MethodType(_fused_forward, module)
    for block in blocks.values():
        for each in _matrices(block):
            adopt(each)
        block.forward = types.MethodType(_block_forward, block)
    return model


# ---- several ranks ---------------------------------------------------------------------------


def _keep_own(module: nn.Module, group: Group) -> None:
    """Leaves this rank's share of a module's experts in it."""
    if _is_fused(module):
        local = len(module.gate_up_proj) // group.ranks
        own = slice(group.rank * local, (group.rank + 1) * local)
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(module, name)
            part = nn.Parameter(whole.detach()[own].clone(), requires_grad=whole.requires_grad)
            setattr(module, name, part)

        def take_own(state_dict, prefix, *_):
            for name in ("gate_up_proj", "down_proj"):
                given = state_dict.get(prefix + name)
                if given is not None and len(given) == local * group.ranks:
                    state_dict[prefix + name] = given[own]

        module._register_load_state_dict_pre_hook(take_own)
        return
    local = len(module.experts) // group.ranks
    own = range(group.rank * local, (group.rank + 1) * local)
    others = [e for e in range(len(module.experts)) if e not in own]
    # The same names as those of a ModuleList.
    module.experts = nn.ModuleDict({str(e): module.experts[e] for e in own})

    def drop_others(state_dict, prefix, *_):
        for key in list(state_dict):
            if any(key.startswith(f"{prefix}experts.{e}.") for e in others):
                del state_dict[key]

    module._register_load_state_dict_pre_hook(drop_others)


def gather_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """``model.state_dict()`` with the experts of all ranks; collective over the group."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if not hasattr(module, "_mok_group"):
            continue
        group = module._mok_group or default_group()
        if group.ranks == 1:
            continue
        prefix = f"{name}." if name else ""
        if _is_fused(module):
            for key in (f"{prefix}gate_up_proj", f"{prefix}down_proj"):
                state[key] = torch.cat(_everyones(state[key], group))
            continue
        local = len(module.experts)
        mine = f"{prefix}experts.{group.rank * local}."
        for suffix in [key.removeprefix(mine) for key in state if key.startswith(mine)]:
            for i in range(local):
                part = state[f"{prefix}experts.{group.rank * local + i}.{suffix}"]
                for rank, theirs in enumerate(_everyones(part, group)):
                    state[f"{prefix}experts.{rank * local + i}.{suffix}"] = theirs
    return state


def _everyones(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    tensor = tensor.detach().contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.ranks)]
    dist.all_gather(parts, tensor, group=group.process_group)
    return parts
