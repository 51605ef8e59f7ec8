"""The layer as a differentiable function of tensors."""

import sys

import torch
from torch import Tensor

from mok import _library
from mok.group import Group, _find_workspace, default_group
from mok.ops import LAYOUTS
from mok.precision import QUANTIZED, QuantizedWeights, checked_precision, for_backward
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


# ---- the formula -----------------------------------------------------------------------------


def _setup_context(ctx, inputs, output):
    *tensors, workspace, _, layout, quantized = inputs
    arguments, main_grads = tensors[:10], tensors[10:]
    _, routing_hash, *saved = output
    ctx.save_for_backward(*arguments, *saved, *quantized)
    # These stay what they were at forward: main_grads may change between forward and backward, and
    # the hash must not be that of a recomputed forward (activation checkpointing).
    ctx.main_grads = main_grads
    ctx.routing_hash = routing_hash
    ctx.workspace = workspace
    ctx.layout = layout
    ctx.mark_non_differentiable(routing_hash, *saved)
    ctx.set_materialize_grads(False)  # no zeros for what is not differentiable


def _backward(ctx, d_y, *_):
    tensors = ctx.saved_tensors  # once: under checkpointing they are computed again
    arguments, saved, quantized = tensors[:10], tensors[10:15], tensors[15:]
    if d_y is None:  # the peers wait for this rank's part all the same
        d_y = torch.zeros_like(arguments[0])
    wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2:10]]  # all but topk_ids
    needs = sum(1 << bit for bit, want in enumerate(wanted) if want)
    operands = (
        d_y, *arguments, ctx.routing_hash, *saved, ctx.workspace, ctx.layout, needs,
        for_backward(quantized),
    )  # fmt: skip
    if any(main_grad is not None for main_grad in ctx.main_grads):
        if torch.is_grad_enabled():  # create_graph=True
            _no_second_derivative()
        grads = torch.ops.mok.backward_accumulate(*operands, *ctx.main_grads)
        delivered = [True, True, *(main_grad is None for main_grad in ctx.main_grads)]
    else:
        grads = torch.ops.mok.backward(*operands)
        delivered = [True] * 9
    d_x, d_topk_weights, *d_weights = (
        grad if want and mine else None
        for grad, want, mine in zip(grads, wanted, delivered, strict=True)
    )
    no_grads = [None] * len(quantized)
    return (d_x, None, d_topk_weights, *d_weights, *(None,) * 10, no_grads)


def _no_second_derivative(*_):
    raise RuntimeError("mok: the layer has no second derivative (create_graph=True)")


torch.library.register_autograd("mok::forward", _backward, setup_context=_setup_context)
torch.library.register_autograd("mok::backward", _no_second_derivative)


# ---- checks: the exception that fits, or None ------------------------------------------------


def _wrong_tensor(name: str, value) -> Exception | None:
    if not isinstance(value, Tensor):
        return TypeError(f"{name}: a tensor is needed, not {type(value).__name__}")
    return None


def _wrong(name: str, value, shape: tuple, letters: str, dtype: torch.dtype) -> Exception | None:
    if not isinstance(value, Tensor):
        return _wrong_tensor(name, value)
    if value.device.type not in _library.DEVICES:
        return ValueError(
            f"{name}: on {value.device}; this build works on {', '.join(_library.DEVICES)} tensors"
        )
    if value.dtype != dtype:
        return TypeError(f"{name}: dtype {value.dtype}, expected {dtype}")
    if value.shape != shape:
        return ValueError(f"{name}: shape {list(value.shape)}, expected {letters} = {list(shape)}")
    return None


def _wrong_weights(weights: tuple, layout: str, sizes: tuple, dtype) -> Exception | None:
    experts, inner, hidden, shared = sizes
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
            wrong = _wrong(name, weight, shape, letters, dtype)
            if wrong is not None:
                return wrong
    return None


def _wrong_tokens(x, topk_ids, topk_weights, hidden: int, topk: int, dtype) -> Exception | None:
    tokens = x.shape[0]
    wrong = _wrong("x", x, (tokens, hidden), "[T, H]", dtype)
    if wrong is None and topk_ids.dtype not in (torch.int32, torch.int64):
        wrong = TypeError(f"topk_ids: dtype {topk_ids.dtype}, expected torch.int32 or torch.int64")
    if wrong is None:
        wrong = _wrong("topk_ids", topk_ids, (tokens, topk), "[T, K]", topk_ids.dtype)
    if wrong is None:
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        wrong = _wrong("topk_weights", topk_weights, (tokens, topk), "[T, K]", sums)
    return wrong


def main_grads_of(weights: tuple, dtype: torch.dtype) -> tuple:
    """Each weight's main_grad, or None where no gradient is wanted; `dtype` is the precision.

    Raises what is wrong with it: missing (ValueError), of another shape, dtype or device.
    """
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    found = []
    for name, weight in zip(WEIGHT_NAMES, weights, strict=True):
        if weight is None or not weight.requires_grad:
            found.append(None)
            continue
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise ValueError(f"{name}.main_grad: missing, but gradients are to be added to it")
        main_grad = _local(main_grad)
        shape = _local(weight).shape
        wrong = _wrong(f"{name}.main_grad", main_grad, shape, "the weight's shape", sums)
        if wrong is None and main_grad.requires_grad:
            wrong = ValueError(f"{name}.main_grad: must not require grad")
        if wrong is None and main_grad.shape[-1] > 1 and main_grad.stride(-1) != 1:
            wrong = ValueError(f"{name}.main_grad: its rows must be contiguous")
        if wrong is not None:
            raise wrong
        found.append(main_grad)
    return tuple(found)


def _local(weight):
    """A DTensor's local shard (differentiably: its gradient comes back as a DTensor)."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(weight, module.DTensor):
        return weight.to_local()
    return weight


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
    quantized: QuantizedWeights | None = None,
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
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is none of {', '.join(LAYOUTS)}")
    if (w_up is None) != (layout != "split"):
        raise ValueError(
            f"w_up: {'missing' if w_up is None else 'given'}, but layout is {layout!r}"
        )
    shared = (w_shared_gate, w_shared_up, w_shared_down)
    if any(w is None for w in shared) != all(w is None for w in shared):
        raise ValueError("w_shared_gate, w_shared_up, w_shared_down: give all three or none")
    if shared_gate_vector is not None and w_shared_gate is None:
        raise ValueError("shared_gate_vector: given without a shared expert")

    checked_precision(precision)
    if quantized is not None and precision not in QUANTIZED:
        raise ValueError(f"quantized: given, but precision is {precision!r}")
    if quantized is not None and not isinstance(quantized, QuantizedWeights):
        raise TypeError(f"quantized: {type(quantized).__name__}, expected mok.QuantizedWeights")

    weights = (w_gate, w_up, w_down, *shared, shared_gate_vector)
    for name, weight in zip(WEIGHT_NAMES, weights, strict=True):
        wrong = None if weight is None else _wrong_tensor(name, weight)
        if wrong is not None:
            raise wrong
    main_grads = (None,) * 7
    if accumulate:
        main_grads = main_grads_of(accumulate_from or weights, w_down.dtype)
    weights = tuple(_local(weight) for weight in weights)

    # The workspace is found by the weights, so that ranks whose tokens do not fit can say so to
    # their peers.
    w_down, w_shared_down = weights[2], weights[5]
    dtype = w_down.dtype
    if dtype not in DTYPES:
        raise TypeError(f"w_down: dtype {dtype}, expected one of {DTYPES}")
    if precision is not None and dtype != torch.bfloat16:
        raise TypeError(f"w_down: dtype {dtype}, expected torch.bfloat16 for precision {precision}")
    if w_down.dim() != 3:
        raise ValueError(f"w_down: shape {list(w_down.shape)}, expected [E_local, H, I]")
    wrong = _wrong_tensor("topk_ids", topk_ids) or _wrong_tensor("x", x)
    wrong = wrong or _wrong_tensor("topk_weights", topk_weights)
    if wrong is not None:
        raise wrong
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids: shape {list(topk_ids.shape)}, expected [T, K]")
    if x.dim() != 2:
        raise ValueError(f"x: shape {list(x.shape)}, expected [T, H]")
    group = group or default_group()
    local_experts, hidden, inner = w_down.shape
    topk = topk_ids.shape[1]
    shared_inner = 0 if w_shared_down is None else w_shared_down.shape[-1]
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit: {swiglu_limit} is not positive")
    sizes = (local_experts, inner, hidden, shared_inner)
    wrong = _wrong_weights(weights, layout, sizes, dtype)
    if wrong is not None:
        raise wrong
    fp8 = []
    if precision in QUANTIZED:
        fp8 = list(quantized or _quantize_weights(precision, *weights[:3], layout=layout))
    workspace, saved_rows = _find_workspace(
        group.key, hidden, inner, local_experts * group.ranks, topk, shared_inner,
        shared_gate_vector is not None, swiglu_limit, dtype,
        group.capacity(0 if group.max_tokens is not None else x.shape[0]), precision,
    )  # fmt: skip

    if torch.is_autocast_enabled("cpu"):
        x = x.to(dtype)
        topk_weights = topk_weights.to(torch.float64 if dtype == torch.float64 else torch.float32)
    wrong = _wrong_tokens(x, topk_ids, topk_weights, hidden, topk, dtype)
    if wrong is None and group.max_tokens is not None and x.shape[0] > group.max_tokens:
        wrong = ValueError(
            f"x: {x.shape[0]} tokens, but max_tokens is {group.max_tokens}; all ranks must call "
            "mok.reserve(max_tokens) first"
        )
    if wrong is not None:
        _refuse(workspace, group, wrong)

    keep = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, topk_weights, *weights)
    )
    outputs = torch.ops.mok.forward(
        x, topk_ids, topk_weights, *weights, *main_grads, workspace, saved_rows if keep else 0,
        LAYOUTS[layout], fp8,
    )  # fmt: skip
    return outputs[0]
