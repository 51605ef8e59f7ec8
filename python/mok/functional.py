"""The interface of the published Mixture-of-Kittens package: code written for it runs unchanged.

Nothing is hidden here: a workspace, a schedule built from the chosen experts, forward, backward.
:func:`mok.moe` and :class:`mok.MoELayer` are the shorter way; docs/python.md compares the two.

    workspace = get_workspace(config, group, device=x.device, num_local_tokens=T, hidden_size=H,
                              topk=K)
    schedule = build_schedule(workspace, config, top_experts, num_local_experts=E_local)
    y, context = forward(config, workspace, schedule, x, router_weights, *shared, *routed)
    d_x, d_router_weights, *d_weights = backward(config, workspace, schedule, context, d_y, x,
                                                 router_weights, *shared, *routed)

Letters: R ranks, T tokens of this rank, T_max of the workspace, K experts per token, E_local = E/R
experts of this rank, H hidden size, I and I_s intermediate sizes of routed and shared experts.

Beyond the published interface: any R up to 8, any sizes, T that differs by rank and call (up to
T_max), ids of -1 (this slot goes nowhere) and int32 ids, no shared expert (None for its three
weights) or one of another width, ``shared_gate_vector``, fp32 and fp64 weights, ``main_grads``.
What ``forward`` returns is differentiable where its inputs require a gradient. Every function but
the ``validate_*`` is collective: all ranks of the group call it, in the same order.

A wrong Python type is a TypeError; a wrong value, shape, dtype or device a ValueError. Both name
the argument.
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from mok import _library
from mok._functional_checks import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Weights,
    check_integer,
    check_type,
    checked_limit,
    checked_main_grads,
    wrong_inputs,
)
from mok.autograd import DTYPES, _refuse
from mok.group import Group, Options, _find_workspace, checked_process_group, new_group
from mok.ops import SPLIT

# ---- what the functions pass around ----------------------------------------------------------


@dataclass(frozen=True)
class MoKConfig:
    """How the work is done; never what comes out. The same on all ranks.

    Attributes:
        fwd_num_comm_sms, bwd_num_comm_sms: SMs that communicate, on a GPU.
        minibatch_size, macrobatch_size: rows between two interleavings of the products, and rows in
            flight, on a GPU. The executors choose all four for themselves.
        schedule_capacity_multiplier: forward keeps the inner activations of that share of all
            R * T_max * K slots for backward; rows beyond are computed again. No routing exceeds it.
        all_gather_top_experts_chunk_bytes: accepted, without effect.
    """

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    schedule_capacity_multiplier: float = 0.5
    all_gather_top_experts_chunk_bytes: int = 2048

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "schedule_capacity_multiplier":
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise TypeError(f"{field.name}: {value!r} is not a number")
                if not 0 <= value < math.inf:
                    raise ValueError(f"{field.name}: {value} is negative or not finite")
            elif isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{field.name}: {value!r} is not an integer")
            elif value < 1:
                raise ValueError(f"{field.name}: {value} is not positive")


class MoKWorkspace:
    """Buffers that the ranks of a group share; made by :func:`get_workspace`.

    Attributes:
        group: the :class:`mok.Group`; ``mok.moe(..., group=workspace.group)`` works with it too.
        device: torch.device.
        num_local_tokens: T_max, the most tokens of any rank in any call.
        hidden_size, topk: H, K.
    """

    def __init__(self, group: Group, process_group, device: torch.device, hidden: int, topk: int):
        self.group = group
        self.device = device
        self.num_local_tokens = group.max_tokens
        self.hidden_size = hidden
        self.topk = topk
        self._process_group = process_group

    @property
    def ranks(self) -> int:
        return self.group.ranks

    def _core(self, weights: Weights, limit: float | None) -> tuple[int, int]:
        """(handle, rows saved for backward) of the core's workspace; made at the first call."""
        return _find_workspace(
            self.group.key, self.hidden_size, weights.inner, weights.experts * self.ranks,
            self.topk, weights.shared_inner, weights.gated, limit, weights.dtype,
            self.num_local_tokens, self.device, weights.precision,
        )  # fmt: skip


@dataclass(frozen=True)
class MoKSchedule:
    """Which row of this rank's experts is which token.

    Rows of an expert stand in global token order (rank, token, k) and begin at a multiple of the
    tile, :data:`TILE_ROWS`; so does what follows.

    Attributes:
        peer_rank: int32 [cap], the rank whose token a row is; -1 on padding rows.
        peer_token_idx: int32 [cap], token * K + k there; 0 on padding rows.
        num_tokens: int32 [1], rows in all, padding included.
        tokens_per_expert: int32 [E_local], rows of each expert, padding included.
        top_experts: [T, K], the ids of this rank's tokens.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    num_tokens: Tensor
    tokens_per_expert: Tensor
    top_experts: Tensor


@dataclass(frozen=True)
class MoKForwardContext:
    """What backward needs of forward besides its arguments."""

    routing_hash: Tensor
    saved: Tensor


TILE_ROWS = _library.tile_rows()


# ---- workspaces ------------------------------------------------------------------------------


def validate_workspace_args(
    config: MoKConfig, group, *, device, num_local_tokens: int, hidden_size: int, topk: int
) -> None:
    """Raises what :func:`create_workspace` would, without being collective.

    Args:
        config: see :class:`MoKConfig`.
        group: a torch.distributed process group, whose ranks share the experts; None: all ranks if
            torch.distributed is initialised, else this process alone.
        device: where the tensors are.
        num_local_tokens: the most tokens of this rank; the largest of all ranks becomes T_max.
        hidden_size, topk: H and K (at most 64).
    """
    check_type("config", config, MoKConfig)
    process_group = checked_process_group("group", group)
    if process_group is not None and dist.get_world_size(process_group) > 8:
        raise ValueError(f"group: {dist.get_world_size(process_group)} ranks, at most 8 can share")
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"device: {device!r} is no device")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {error}") from None
    _library.check_device("device", device)
    check_integer("num_local_tokens", num_local_tokens, 0)
    check_integer("hidden_size", hidden_size, 1)
    check_integer("topk", topk, 1)
    if topk > 64:
        raise ValueError(f"topk: {topk} is more than 64")


def create_workspace(
    config: MoKConfig, group, *, device, num_local_tokens: int, hidden_size: int, topk: int
) -> MoKWorkspace:
    """A new workspace; collective. Arguments and errors: :func:`validate_workspace_args`."""
    validate_workspace_args(
        config, group, device=device, num_local_tokens=num_local_tokens, hidden_size=hidden_size,
        topk=topk,
    )  # fmt: skip
    process_group = checked_process_group("group", group)
    ranks = 1 if process_group is None else dist.get_world_size(process_group)
    most = num_local_tokens
    if ranks > 1:
        everyone = [None] * ranks
        dist.all_gather_object(everyone, (num_local_tokens, hidden_size, topk), process_group)
        most = max(tokens for tokens, _, _ in everyone)
        for rank, (_, *sizes) in enumerate(everyone):
            if sizes != [hidden_size, topk]:
                raise ValueError(
                    f"hidden_size, topk: rank {rank} has {sizes}, this one {[hidden_size, topk]}"
                )
    slots = ranks * most * topk
    saved = min(math.ceil(slots * config.schedule_capacity_multiplier), slots)
    options = Options(saved_rows=saved)
    if process_group is not None:
        made = new_group(process_group, max_tokens=most, options=options)
    else:
        made = new_group(max_tokens=most, options=options)
    return MoKWorkspace(made, process_group, _with_index(device), hidden_size, topk)


def _with_index(device) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


_cache: dict[tuple, MoKWorkspace] = {}


def get_workspace(
    config: MoKConfig, group, *, device, num_local_tokens: int, hidden_size: int, topk: int
) -> MoKWorkspace:
    """The workspace for these arguments, made at the first call; later calls only look it up.

    Making it is collective, and so is growing it: where num_local_tokens is beyond the workspace's
    T_max, a larger one takes its place (on all ranks, which therefore all call with more tokens, or
    all call with the most of any rank). What was made of the old one stays valid.

    Arguments and errors: :func:`validate_workspace_args`.
    """
    settings = {
        "device": device, "num_local_tokens": num_local_tokens, "hidden_size": hidden_size,
        "topk": topk,
    }  # fmt: skip
    validate_workspace_args(config, group, **settings)
    key = (group, _with_index(device), hidden_size, topk, config.schedule_capacity_multiplier)
    found = _cache.get(key)
    if found is None or found.num_local_tokens < num_local_tokens:
        found = _cache[key] = create_workspace(config, group, **settings)
    return found


def clear_workspace_cache() -> None:
    """Forgets the cached workspaces; their memory goes when nothing else refers to them."""
    _cache.clear()


# ---- schedules -------------------------------------------------------------------------------


def _wrong_ids(workspace: MoKWorkspace, top_experts, num_local_experts) -> Exception | None:
    if isinstance(num_local_experts, bool) or not isinstance(num_local_experts, int):
        return TypeError(f"num_local_experts: {num_local_experts!r} is not an integer")
    if num_local_experts < 1:
        return ValueError(f"num_local_experts: {num_local_experts} is not positive")
    if not isinstance(top_experts, Tensor):
        return TypeError(f"top_experts: {type(top_experts).__name__}, expected a tensor")
    if top_experts.dtype not in (torch.int32, torch.int64):
        return ValueError(f"top_experts: dtype {top_experts.dtype}, expected torch.int64")
    if top_experts.device != workspace.device:
        return ValueError(f"top_experts: on {top_experts.device}, not on {workspace.device}")
    if top_experts.dim() != 2 or top_experts.shape[1] != workspace.topk:
        shape = list(top_experts.shape)
        return ValueError(f"top_experts: shape {shape}, expected [T, {workspace.topk}]")
    if top_experts.shape[0] > workspace.num_local_tokens:
        return ValueError(
            f"top_experts: {top_experts.shape[0]} tokens, but the workspace is for "
            f"{workspace.num_local_tokens}"
        )
    return None


def _all_ids(workspace: MoKWorkspace, top_experts, wrong: Exception | None) -> Tensor:
    """Every rank's ids, int64 [R, T_max, K], -1 beyond a rank's T. Raises `wrong` everywhere."""
    most, topk = workspace.num_local_tokens, workspace.topk
    mine = torch.full((1 + most * topk,), -1, dtype=torch.int64, device=workspace.device)
    if wrong is None:
        mine[0] = top_experts.shape[0]
        mine[1 : 1 + top_experts.numel()] = top_experts.reshape(-1)
    everyone = [mine]
    if workspace.ranks > 1:
        everyone = [torch.empty_like(mine) for _ in range(workspace.ranks)]
        dist.all_gather(everyone, mine, workspace._process_group)
    if wrong is not None:
        raise wrong
    if workspace.device.type == "cpu":  # elsewhere looking at values would wait for the device
        for rank, theirs in enumerate(everyone):
            if theirs[0] < 0:
                raise ValueError(f"top_experts: rank {rank}'s arguments were refused there")
    return torch.stack(everyone)[:, 1:].view(workspace.ranks, most, topk)


def build_schedule(
    workspace: MoKWorkspace, config: MoKConfig, top_experts: Tensor, *, num_local_experts: int
) -> MoKSchedule:
    """Where the rows of this rank's experts come from.

    Args:
        top_experts: int64 (or int32) [T, K], global expert ids; -1 = this slot goes nowhere.
        num_local_experts: E_local; expert e belongs to rank e // E_local.

    Raises ValueError, on all ranks, for an id outside [-1, R * E_local); rank, token, slot and id
    are named. (On a GPU that is found by ``forward``.)
    """
    check_type("workspace", workspace, MoKWorkspace)
    check_type("config", config, MoKConfig)
    with torch.no_grad():
        wrong = _wrong_ids(workspace, top_experts, num_local_experts)
        ids = _all_ids(workspace, top_experts, wrong)
        experts = workspace.ranks * num_local_experts
        if workspace.device.type == "cpu":
            bad = ((ids < -1) | (ids >= experts)).nonzero()
            if len(bad):
                rank, token, slot = bad[0].tolist()
                raise ValueError(
                    f"top_experts: rank {rank}, token {token}, slot {slot}: id "
                    f"{ids[rank, token, slot].item()} is outside [-1, {experts})"
                )
        # No value is looked at on the host from here on.
        mine = ids.flatten() - workspace.group.rank * num_local_experts
        mine = torch.where((mine >= 0) & (mine < num_local_experts), mine, num_local_experts)
        expert, slot = torch.sort(mine, stable=True)  # of an expert: in global order
        counts = torch.zeros(num_local_experts + 1, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, mine, torch.ones_like(mine))
        padded = (counts + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        place = torch.arange(len(mine), device=ids.device) - (counts.cumsum(0) - counts)[expert]
        row = place + (padded.cumsum(0) - padded)[expert]
        capacity = TILE_ROWS * (len(mine) // TILE_ROWS + num_local_experts + 1)
        row = torch.where(expert < num_local_experts, row, capacity)  # one row more takes the rest
        owned = workspace.num_local_tokens * workspace.topk  # slots of a rank
        peer_rank = torch.full((capacity + 1,), -1, dtype=torch.int32, device=ids.device)
        peer_token_idx = torch.zeros_like(peer_rank)
        if owned:
            peer_rank[row] = (slot // owned).int()
            peer_token_idx[row] = (slot % owned).int()
        padded = padded[:num_local_experts].int()
        return MoKSchedule(
            peer_rank[:capacity], peer_token_idx[:capacity],
            padded.sum(dtype=torch.int32).view(1), padded, top_experts.detach().clone(),
        )  # fmt: skip


# ---- checks ----------------------------------------------------------------------------------


def _check_objects(config, workspace, schedule) -> None:
    check_type("config", config, MoKConfig)
    check_type("workspace", workspace, MoKWorkspace)
    check_type("schedule", schedule, MoKSchedule)


def validate_inputs(
    config: MoKConfig, workspace: MoKWorkspace, schedule: MoKSchedule, x: Tensor,
    router_weights: Tensor | None = None, grad_output: Tensor | None = None,
) -> None:  # fmt: skip
    """Raises what :func:`forward` and :func:`backward` would of these; not collective.

    Args:
        x: bf16 (or fp32, fp64, as the weights) [T, H], T that of the schedule.
        router_weights: fp32 [T, K] (fp64 for fp64).
        grad_output: [T, H] of x's dtype.
    """
    _check_objects(config, workspace, schedule)
    check_type("x", x, Tensor)
    if x.dtype not in DTYPES:
        raise ValueError(f"x: dtype {x.dtype}, expected torch.bfloat16")
    wrong = wrong_inputs(workspace, schedule, x.dtype, x, router_weights, grad_output)
    if wrong is not None:
        raise wrong


# ---- the layer -------------------------------------------------------------------------------


def forward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    shared_down_weights: Tensor | None,
    routed_gate_weights: Tensor | tuple,
    routed_up_weights: Tensor | tuple,
    routed_down_weights: Tensor | tuple,
    swiglu_limit: float | None = None,
    *,
    shared_gate_vector: Tensor | None = None,
) -> tuple[Tensor, MoKForwardContext]:
    """The layer; differentiable where an argument requires a gradient (not in MXFP8).

    Args:
        x: bf16 [T, H], T that of the schedule.
        router_weights: fp32 [T, K]; applied once, to an expert's output.
        shared_gate_weights, shared_up_weights, shared_down_weights: [I_s, H], [I_s, H], [H, I_s];
            None, None, None: no shared expert.
        routed_gate_weights, routed_up_weights, routed_down_weights: [E_local, I, H],
            [E_local, I, H], [E_local, H, I], of x's dtype. Their dtype is the precision: bf16, or
            fp32 and fp64 (CPU). MXFP8: a tuple (data, scale) each, what
            :func:`mok.ops.mxfp8_quantize` returns first; all else is bf16 then. The caller
            quantises, whenever the weights have changed.
        swiglu_limit: L of silu(min(g, L)) * clamp(u, -L, L); None = no limit.
        shared_gate_vector: [1, H]; the shared expert is scaled by sigmoid(x . vector).

    Returns: (output [T, H] of x's dtype, the context for :func:`backward`).
    """
    _check_objects(config, workspace, schedule)
    weights = Weights(
        workspace, (shared_gate_weights, shared_up_weights, shared_down_weights),
        (routed_gate_weights, routed_up_weights, routed_down_weights), shared_gate_vector, FORWARD,
    )  # fmt: skip
    handle, saved_rows = workspace._core(weights, checked_limit(swiglu_limit))
    wrong = wrong_inputs(workspace, schedule, weights.dtype, x, router_weights, None)
    if wrong is None and router_weights is None:
        wrong = TypeError("router_weights: None, expected a tensor")
    if wrong is not None:
        _refuse(handle, workspace.group, wrong)
    if weights.precision == "mxfp8":  # autograd would need what backward's tuples hold
        x, router_weights = x.detach(), router_weights.detach()
        weights.tensors = tuple(w if w is None else w.detach() for w in weights.tensors)
    y, routing_hash, saved = torch.ops.mok.forward(
        x, schedule.top_experts, router_weights, *weights.tensors, *(None,) * 7, handle, saved_rows,
        SPLIT, weights.quantized,
    )  # fmt: skip
    return y, MoKForwardContext(routing_hash, saved)


def recompute_forward_context(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    routed_gate_weights: Tensor | tuple,
    routed_up_weights: Tensor | tuple,
    swiglu_limit: float | None = None,
) -> MoKForwardContext:
    """A context for :func:`backward` where that of forward was not kept (checkpointing).

    Backward itself computes the activations again, with the same bits, so nothing is kept here and
    no work is done. Arguments as of :func:`forward`; MXFP8 weights may be backward's tuples.
    """
    _check_objects(config, workspace, schedule)
    routed = (routed_gate_weights, routed_up_weights)
    if all(isinstance(weight, tuple) and len(weight) == 4 for weight in routed):
        routed = tuple(weight[:2] for weight in routed)  # backward's tuples will do
    weights = Weights(workspace, (shared_gate_weights, shared_up_weights), routed, None, RECOMPUTE)
    checked_limit(swiglu_limit)
    wrong = wrong_inputs(workspace, schedule, weights.dtype, x, None, None)
    if wrong is not None:
        raise wrong
    return MoKForwardContext(torch.ops.mok.routing_hash(schedule.top_experts), x.new_empty(0))


def backward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    forward_context: MoKForwardContext,
    grad_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    shared_down_weights: Tensor | None,
    routed_gate_weights: Tensor | tuple,
    routed_up_weights: Tensor | tuple,
    routed_down_weights: Tensor | tuple,
    swiglu_limit: float | None = None,
    *,
    shared_gate_vector: Tensor | None = None,
    main_grads: tuple | None = None,
) -> tuple:
    """The gradients of :func:`forward`, of which it takes the arguments.

    Args:
        forward_context: of ``forward`` or :func:`recompute_forward_context`.
        grad_output: [T, H] of x's dtype.
        routed_gate_weights, routed_up_weights, routed_down_weights: in MXFP8 (data, scale, data_T,
            scale_T) for gate and up, all that :func:`mok.ops.mxfp8_quantize` returns, and (data_T,
            scale_T) for down. Gradients are bf16, those of the values that were quantised.
        main_grads: as many tensors or None as there are weights, in the order of the arguments
            (the vector last, if given): fp32 of the weight's shape, to which the full fp32 sum is
            added; that weight's gradient is then None.

    Returns: (d_x [T, H], d_router_weights fp32 [T, K], d_routed_gate, d_routed_up, d_routed_down,
        d_shared_gate, d_shared_up, d_shared_down), and d_shared_gate_vector if there is one; of
        weights in the weights' dtype, None where there is no weight. Routed weights': over all
        ranks' tokens; the shared expert's: over this rank's own.
    """
    _check_objects(config, workspace, schedule)
    check_type("forward_context", forward_context, MoKForwardContext)
    weights = Weights(
        workspace, (shared_gate_weights, shared_up_weights, shared_down_weights),
        (routed_gate_weights, routed_up_weights, routed_down_weights), shared_gate_vector, BACKWARD,
    )  # fmt: skip
    targets = checked_main_grads(weights, main_grads, workspace.device)
    handle, _ = workspace._core(weights, checked_limit(swiglu_limit))
    wrong = wrong_inputs(workspace, schedule, weights.dtype, x, router_weights, grad_output)
    if wrong is None and (router_weights is None or grad_output is None):
        name = "router_weights" if router_weights is None else "grad_output"
        wrong = TypeError(f"{name}: None, expected a tensor")
    if wrong is not None:
        _refuse(handle, workspace.group, wrong)
    needs = 3  # d_x, d_router_weights
    for bit, weight in enumerate(weights.tensors):
        needs |= (weight is not None) << (2 + bit)
    with torch.no_grad():
        operands = (
            grad_output, x, schedule.top_experts, router_weights, *weights.tensors,
            forward_context.routing_hash, forward_context.saved, handle, SPLIT, needs,
            weights.quantized,
        )  # fmt: skip
        if any(target is not None for target in targets):
            grads = torch.ops.mok.backward_accumulate(*operands, *targets)
        else:
            grads = torch.ops.mok.backward(*operands)
    d_weights = [
        None if weight is None or target is not None else grad
        for grad, weight, target in zip(grads[2:], weights.tensors, targets, strict=True)
    ]
    return (*grads[:2], *d_weights[: 7 if weights.gated else 6])
