"""The layer as a differentiable function of tensors."""

import functools
import sys

import torch
from torch import Tensor

from mok import _library
from mok.group import Group, _find_workspace, default_group
from mok.ops import LAYOUTS
from mok.precision import (
    QUANTIZED,
    QuantizedWeights,
    RoundedWeights,
    checked_precision,
    for_backward,
)
from mok.precision import quantize_weights as _quantize_weights

WEIGHT_NAMES = (
    "w_gate",
    "w_up",
    "w_down",
    "w_shared_gate",
    "w_shared_up",
    "w_shared_down",
    "shared_gate_vector",
)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_NO_MAIN_GRADS = (None,) * 7
_BACKWARD = torch.ops.mok.backward.default
_BACKWARD_ACCUMULATE = torch.ops.mok.backward_accumulate.default

# A quarter of what torch.is_autocast_enabled(device) takes.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def _directly(operator):
    """The operator by the shortest way to PyTorch's dispatcher.

    What an operator's wrapper calls looks for ``__torch_function__`` in every argument first. That
    takes an eighth of a call; autograd and dispatch modes do without.
    """
    overload = operator.default
    call = getattr(torch._C, "_dispatch_call_boxed", None)
    handle = getattr(overload, "_handle", None)
    if call is None or handle is None:
        return getattr(overload, "_op", overload)
    return functools.partial(call, handle)


_FORWARD_EAGER = _directly(torch.ops.mok.forward_eager)
_BACKWARD_EAGER = _directly(torch.ops.mok.backward_eager)
_BACKWARD_ACCUMULATE_EAGER = _directly(torch.ops.mok.backward_accumulate_eager)


# ---- the formula in graphs: of the operator `forward` ----------------------------------------


@functools.cache
def _bits(wanted: tuple[bool, ...]) -> int:
    return sum(want << bit for bit, want in enumerate(wanted))


def _gradients(ctx, d_y, tensors, wanted):
    """(d_x, d_topk_weights, seven of weights); None where not `wanted` or added to a main_grad.

    tensors: the ten arguments, what forward saved, and the quantised weights, if any.
    """
    arguments, saved, quantized = tensors[:10], tensors[10], tensors[11:]
    main_grads = ctx.main_grads
    if d_y is None:  # the peers wait for this rank's part all the same
        d_y = torch.zeros_like(arguments[0])
    operands = (
        d_y, *arguments, ctx.routing_hash, saved, ctx.workspace, ctx.layout, _bits(wanted),
        for_backward(quantized) if quantized else None,
    )  # fmt: skip
    if any([main_grad is not None for main_grad in main_grads]):
        if torch.is_grad_enabled():  # create_graph=True
            _no_second_derivative()
        grads = _BACKWARD_ACCUMULATE(*operands, *main_grads)
        wanted = (*wanted[:2], *(w and m is None for w, m in zip(wanted[2:], main_grads)))  # noqa: B905
    else:
        grads = _BACKWARD(*operands)
    return [grad if want else None for grad, want in zip(grads, wanted)]  # noqa: B905


def _setup_context(ctx, inputs, output):
    *tensors, workspace, _, layout, quantized = inputs
    arguments, main_grads = tensors[:10], tensors[10:]
    _, routing_hash, saved = output
    ctx.save_for_backward(*arguments, saved, *(quantized or ()))
    # These stay what they were at forward: main_grads may change between forward and backward, and
    # the hash must not be that of a recomputed forward (activation checkpointing).
    ctx.main_grads = tuple(main_grads)
    ctx.routing_hash = routing_hash
    ctx.workspace = workspace
    ctx.layout = layout
    ctx.mark_non_differentiable(routing_hash, saved)
    ctx.set_materialize_grads(False)  # no zeros for what is not differentiable


def _backward(ctx, d_y, *_):
    tensors = ctx.saved_tensors  # once: under checkpointing they are computed again
    needs = ctx.needs_input_grad
    wanted = (needs[0], *needs[2:10])  # all but topk_ids
    d_x, *others = _gradients(ctx, d_y, tensors, wanted)
    return (d_x, None, *others, *(None,) * 10, [None] * len(tensors[11:]) or None)


def _no_second_derivative(*_):
    raise RuntimeError("mok: the layer has no second derivative (create_graph=True)")


torch.library.register_autograd("mok::forward", _backward, setup_context=_setup_context)
torch.library.register_autograd("mok::backward", _no_second_derivative)


# ---- the formula in eager mode ---------------------------------------------------------------
#
# An autograd.Function of operators without a formula of their own, because PyTorch's way to an
# operator's formula costs tens of microseconds a call. Each tensor that is made, argument that is
# passed and helper that is called costs one or so: there are few.


@functools.cache
def _eager_bits(needs: tuple[bool, ...]) -> int:
    """Bits of the operator's `needs`; of _MoE's arguments."""
    return _bits((needs[1], *needs[3:11]))


class _MoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *arguments):
        workspace, saved_rows, layout, main_grads, quantized = call
        y, routing_hash, saved = _FORWARD_EAGER(
            *arguments, workspace, True, saved_rows, layout, quantized
        )
        ctx.save_for_backward(*arguments, saved, *(quantized or ()))
        ctx.call = workspace, layout, main_grads, routing_hash  # not saved: see _setup_context
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx, d_y):
        tensors = ctx.saved_tensors  # once: under checkpointing they are computed again
        workspace, layout, main_grads, routing_hash = ctx.call
        if d_y is None:  # the peers wait for this rank's part all the same
            d_y = torch.zeros_like(tensors[0])
        operands = (
            d_y, *tensors[:10], routing_hash, tensors[10], workspace, layout,
            _eager_bits(ctx.needs_input_grad),
            for_backward(tensors[11:]) if len(tensors) > 11 else None,
        )  # fmt: skip
        if main_grads is not None:
            if torch.is_grad_enabled():  # create_graph=True
                _no_second_derivative()
            grads = _BACKWARD_ACCUMULATE_EAGER(*operands, *main_grads)
        elif torch.is_grad_enabled():
            grads = _BACKWARD(*operands)
        else:
            grads = _BACKWARD_EAGER(*operands)
        return None, grads[0], None, *grads[1:]


# Function.apply without its care for functorch, which costs as much as all the rest.
_apply = super(torch.autograd.Function, _MoE).apply


# ---- checks: the exception that fits, or None ------------------------------------------------


def _wrong_tensor(name: str, value) -> Exception | None:
    if not isinstance(value, Tensor):
        return TypeError(f"{name}: a tensor is needed, not {type(value).__name__}")
    return None


def _wrong(
    name: str, value, shape: tuple, letters: str, dtype: torch.dtype, device: torch.device
) -> Exception | None:
    if not isinstance(value, Tensor):
        return _wrong_tensor(name, value)
    if value.device != device:
        return ValueError(f"{name}: on {value.device}, w_down on {device}")
    if value.dtype != dtype:
        return TypeError(f"{name}: dtype {value.dtype}, expected {dtype}")
    if value.shape != shape:
        return ValueError(f"{name}: shape {list(value.shape)}, expected {letters} = {list(shape)}")
    return None


def _wrong_weights(weights: tuple, layout: str) -> Exception | None:
    w_down, w_shared_down = weights[2], weights[5]
    experts, hidden, inner = w_down.shape
    shared = 0 if w_shared_down is None else w_shared_down.shape[-1]
    rows = inner if layout == "split" else 2 * inner
    expected = (
        ((experts, rows, hidden), "[E_local, I, H]" if layout == "split" else "[E_local, 2I, H]"),
        ((experts, inner, hidden), "[E_local, I, H]"),
        ((experts, hidden, inner), "[E_local, H, I]"),
        ((shared, hidden), "[I_s, H]"),
        ((shared, hidden), "[I_s, H]"),
        ((hidden, shared), "[H, I_s]"),
        ((1, hidden), "[1, H]"),
    )
    for name, weight, (shape, letters) in zip(WEIGHT_NAMES, weights, expected, strict=True):
        if weight is not None:
            wrong = _wrong(name, weight, shape, letters, w_down.dtype, w_down.device)
            if wrong is not None:
                return wrong
    return None


def _wrong_tokens(x, topk_weights, topk_ids, w_down, group: Group) -> Exception | None:
    tokens, hidden, topk = x.shape[0], w_down.shape[1], topk_ids.shape[1]
    dtype, device = w_down.dtype, w_down.device
    wrong = _wrong("x", x, (tokens, hidden), "[T, H]", dtype, device)
    if wrong is None and topk_ids.dtype not in (torch.int32, torch.int64):
        wrong = TypeError(f"topk_ids: dtype {topk_ids.dtype}, expected torch.int32 or torch.int64")
    if wrong is None:
        wrong = _wrong("topk_ids", topk_ids, (tokens, topk), "[T, K]", topk_ids.dtype, device)
    if wrong is None:
        wrong = _wrong(
            "topk_weights", topk_weights, (tokens, topk), "[T, K]", _sum_dtype(dtype), device
        )
    if wrong is None and group.max_tokens is not None and tokens > group.max_tokens:
        wrong = ValueError(
            f"x: {tokens} tokens, but max_tokens is {group.max_tokens}; all ranks must call "
            "mok.reserve(max_tokens) first"
        )
    return wrong


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def main_grads_of(weights: tuple, dtype: torch.dtype) -> tuple:
    """Each weight's main_grad, or None where no gradient is wanted; `dtype` is the precision.

    Raises what is wrong with it: missing (ValueError), of another shape, dtype or device.
    """
    found = []
    for name, weight in zip(WEIGHT_NAMES, weights, strict=True):
        if weight is None or not weight.requires_grad:
            found.append(None)
            continue
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise ValueError(f"{name}.main_grad: missing, but gradients are to be added to it")
        main_grad = _local(main_grad)
        weight = _local(weight)
        wrong = _wrong(
            f"{name}.main_grad", main_grad, weight.shape, "the weight's shape", _sum_dtype(dtype),
            weight.device,
        )  # fmt: skip
        if wrong is None and main_grad.requires_grad:
            wrong = ValueError(f"{name}.main_grad: must not require grad")
        if wrong is None and main_grad.stride(-1) != 1 and main_grad.shape[-1] > 1:
            wrong = ValueError(f"{name}.main_grad: its rows must be contiguous")
        if wrong is not None:
            raise wrong
        found.append(main_grad)
    return tuple(found)


def _locals(weights: tuple) -> tuple:
    """DTensors' local shards (differentiably: their gradients come back as DTensors)."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return weights
    return tuple([w.to_local() if isinstance(w, module.DTensor) else w for w in weights])


def _local(weight):
    return _locals((weight,))[0]


def _refuse(handle: int, group: Group, error: Exception):
    if group.ranks > 1:
        _library.abort_call(handle)  # the peers fail at once, too
    raise error


# ---- the function ----------------------------------------------------------------------------


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    w_shared_gate: Tensor | None = None,
    w_shared_up: Tensor | None = None,
    w_shared_down: Tensor | None = None,
    shared_gate_vector: Tensor | None = None,
    *,
    swiglu_limit: float | None = None,
    layout: str = "split",
    accumulate: bool = False,
    accumulate_from: tuple | None = None,
    precision: str | None = None,
    quantized: QuantizedWeights | RoundedWeights | None = None,
    group: Group | None = None,
) -> Tensor:
    """A mixture-of-experts layer without its router. Collective over the group, as is its backward.

    T tokens of this rank (any number, 0 included, up to the group's ``max_tokens``), K experts per
    token, E_local = E / R experts of I inner channels on this rank, a shared expert of I_s. The
    dtype of the weights is the precision: bf16, fp32 or fp64; with bf16 weights ``precision`` may
    ask for "mxfp8" or "fp8". Under autocast x is converted to the weights' dtype, and topk_weights
    to fp32; else they must fit.

    Args:
        x: [T, H], of the weights' dtype.
        topk_ids: int32 or int64 [T, K], global expert ids; -1 = this slot goes nowhere. The same
            expert twice in a token counts twice.
        topk_weights: [T, K], fp32 (fp64 for fp64). Applied once, to an expert's output.
        w_gate, w_up: [E_local, I, H] each; or, with another layout, w_gate [E_local, 2I, H] and
            w_up None.
        w_down: [E_local, H, I].
        w_shared_gate, w_shared_up, w_shared_down: [I_s, H], [I_s, H], [H, I_s]; None without a
            shared expert.
        shared_gate_vector: [1, H]; the shared expert's output is scaled by sigmoid(x . vector).
        swiglu_limit: L of silu(min(g, L)) * clamp(u, -L, L); None = no limit.
        layout: "split"; "stacked": gate's I rows, then up's; "interleaved": gate and up by turns.
        accumulate: gradients of weights are added to their attribute ``main_grad`` (fp32, or fp64
            for fp64; of the weight's shape), and autograd gets None for them.
        accumulate_from: with ``accumulate``, the seven weights whose ``main_grad`` is meant, where
            those given are converted copies.
        precision: None: the weights' dtype; or "bf16", "mxfp8", "fp8", all of bf16 weights. In the
            latter two the routed experts multiply FP8 numbers (docs/numerics.md, "Precisions"), and
            gradients pass straight through the quantisation.
        quantized: with them, :func:`mok.quantize_weights` of the weights, so that it is not done at
            every call; only its values are multiplied then, so it must be of these weights.
        group: the EP group; default: that of :func:`mok.init`.

    Returns: y [T, H] of x's dtype. Gradients go to whatever requires them: x, topk_weights and
        weights. Those of routed experts are over all ranks' tokens; those of the shared expert over
        this rank's own.

    Raises:
        TypeError, ValueError: an argument does not fit (it is named); ids outside [-1, E); ranks
            that call with different shapes.
        RuntimeError: a rank failed or did not come in time (it is named).
    """
    given = (w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down, shared_gate_vector)
    weights = _locals(given)
    group = group or default_group()
    owners = None  # of main_grad
    if accumulate:
        owners = accumulate_from or given

    # What was found once is not checked here again: the operator's checks have better speed, if not
    # better words, which are looked for when it refuses.
    eager = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    if eager:
        key, found = _find(weights, x, topk_ids, swiglu_limit, layout, precision, quantized, group)
        if found is not None:
            try:
                return _call(
                    found, True, x, topk_ids, topk_weights, weights, owners, layout, precision,
                    quantized,
                )  # fmt: skip
            except Exception:
                wrong = _wrong_call(
                    x, topk_ids, topk_weights, weights, layout, precision, quantized, group
                )
                if wrong is not None:
                    raise wrong from None
                raise

    _check_given(x, topk_ids, topk_weights, weights, layout, precision, quantized)
    capacity = group.capacity(0 if group.max_tokens is not None else x.shape[0])
    found = _checked_workspace(
        weights, layout, topk_ids.shape[1], swiglu_limit, capacity, precision, group
    )
    wrong = _wrong_tokens(*_under_autocast(x, topk_weights, weights), topk_ids, weights[2], group)
    if wrong is not None:
        _refuse(found[0], group, wrong)
    if eager:
        group.found[key] = found
    return _call(
        found, eager, x, topk_ids, topk_weights, weights, owners, layout, precision, quantized
    )


def _find(weights, x, topk_ids, swiglu_limit, layout, precision, quantized, group: Group):
    """(key, what was found under it or None); all that decides about a workspace is in the key."""
    w_down, w_shared_down = weights[2], weights[5]
    try:
        capacity = group.max_tokens
        if capacity is None:
            capacity = group.capacity(x.shape[0])
        key = (
            w_down.shape, topk_ids.shape[1], None if w_shared_down is None else w_shared_down.shape,
            weights[6] is None, swiglu_limit, layout, precision, type(quantized), w_down.dtype,
            w_down.device, capacity,
        )  # fmt: skip
        return key, group.found.get(key)
    except (AttributeError, IndexError, TypeError):  # something is wrong, and will be named
        return None, None


def _call(
    found, eager: bool, x, topk_ids, topk_weights, weights, owners, layout, precision, quantized
):
    """The operator, as cheaply as it can be had."""
    workspace, saved_rows = found
    if (not eager or _any_autocast()) and torch.is_autocast_enabled(weights[2].device.type):
        x, topk_weights = _converted(x, topk_weights, weights)
    main_grads = None
    if owners is not None:
        main_grads = main_grads_of(owners, weights[2].dtype)
        if all([main_grad is None for main_grad in main_grads]):
            main_grads = None
    fp8 = None
    if precision in QUANTIZED:
        fp8 = list(quantized or _quantize_weights(precision, *weights[:3], layout=layout))
    differentiable = torch.is_grad_enabled() and (
        x.requires_grad
        or topk_weights.requires_grad
        or any([w is not None and w.requires_grad for w in weights])
    )
    if not eager:
        return torch.ops.mok.forward(
            x, topk_ids, topk_weights, *weights, *(main_grads or _NO_MAIN_GRADS), workspace,
            saved_rows if differentiable else 0, LAYOUTS[layout], fp8,
        )[0]  # fmt: skip
    if differentiable:
        call = workspace, saved_rows, LAYOUTS[layout], main_grads, fp8
        return _apply(call, x, topk_ids, topk_weights, *weights)
    return _FORWARD_EAGER(
        x, topk_ids, topk_weights, *weights, workspace, False, 0, LAYOUTS[layout], fp8
    )[0]


def _under_autocast(x, topk_weights, weights):
    if torch.is_autocast_enabled(weights[2].device.type):
        return _converted(x, topk_weights, weights)
    return x, topk_weights


def _converted(x, topk_weights, weights):
    dtype = weights[2].dtype
    return x.to(dtype), topk_weights.to(_sum_dtype(dtype))


def _wrong_call(
    x, topk_ids, topk_weights, weights, layout, precision, quantized, group
) -> Exception | None:
    """Why the operator may have refused its arguments."""
    try:
        _check_given(x, topk_ids, topk_weights, weights, layout, precision, quantized)
    except (TypeError, ValueError) as wrong:
        return wrong
    low = _under_autocast(x, topk_weights, weights)
    return _wrong_weights(weights, layout) or _wrong_tokens(*low, topk_ids, weights[2], group)


def _check_given(x, topk_ids, topk_weights, weights, layout, precision, quantized) -> None:
    """Raises for what is missing, of a wrong type, or on a device without operators."""
    _, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down, shared_gate_vector = weights
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is none of {', '.join(LAYOUTS)}")
    if (w_up is None) != (layout != "split"):
        raise ValueError(
            f"w_up: {'missing' if w_up is None else 'given'}, but layout is {layout!r}"
        )
    no_shared = w_shared_gate is None
    if (w_shared_up is None) != no_shared or (w_shared_down is None) != no_shared:
        raise ValueError("w_shared_gate, w_shared_up, w_shared_down: give all three or none")
    if shared_gate_vector is not None and no_shared:
        raise ValueError("shared_gate_vector: given without a shared expert")

    checked_precision(precision)
    if quantized is not None and precision not in QUANTIZED:
        raise ValueError(f"quantized: given, but precision is {precision!r}")
    if quantized is not None and not isinstance(quantized, QuantizedWeights | RoundedWeights):
        raise TypeError(f"quantized: {type(quantized).__name__}, expected mok.QuantizedWeights")

    for name, weight in zip(WEIGHT_NAMES, weights):  # noqa: B905
        if weight is not None and not isinstance(weight, Tensor):
            raise _wrong_tensor(name, weight)
    wrong = _wrong_tensor("topk_ids", topk_ids) or _wrong_tensor("x", x)
    wrong = wrong or _wrong_tensor("topk_weights", topk_weights)
    if wrong is not None:
        raise wrong
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids: shape {list(topk_ids.shape)}, expected [T, K]")
    if x.dim() != 2:
        raise ValueError(f"x: shape {list(x.shape)}, expected [T, H]")
    _library.check_device("w_down", w_down.device)


def _checked_workspace(
    weights, layout: str, topk: int, swiglu_limit, capacity: int, precision, group: Group
):
    """(handle, rows saved for backward).

    It is found by the weights, so that ranks whose tokens do not fit can say so to their peers.
    """
    w_down, w_shared_down = weights[2], weights[5]
    if w_down.dtype not in DTYPES:
        raise TypeError(f"w_down: dtype {w_down.dtype}, expected one of {DTYPES}")
    if precision is not None and w_down.dtype != torch.bfloat16:
        raise TypeError(
            f"w_down: dtype {w_down.dtype}, expected torch.bfloat16 for precision {precision}"
        )
    if w_down.dim() != 3:
        raise ValueError(f"w_down: shape {list(w_down.shape)}, expected [E_local, H, I]")
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit: {swiglu_limit} is not positive")
    wrong = _wrong_weights(weights, layout)
    if wrong is not None:
        raise wrong
    local_experts, hidden, inner = w_down.shape
    shared_inner = 0 if w_shared_down is None else w_shared_down.shape[-1]
    return _find_workspace(
        group.key, hidden, inner, local_experts * group.ranks, topk, shared_inner,
        weights[6] is not None, swiglu_limit, w_down.dtype, capacity, w_down.device,
        precision,
    )  # fmt: skip
