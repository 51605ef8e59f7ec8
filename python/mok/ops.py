"""The operators of libmok_torch.so: fake kernels, the choice of experts, and FP8.

``torch.ops.mok.forward``, ``backward`` and ``backward_accumulate`` are defined in C++ and known
here by their outputs' shapes alone, so that they trace with symbolic T. Those with ``_eager`` in
their names are :func:`mok.moe`'s outside graphs. They keep no Python state:
a workspace is an integer. Most code calls :func:`mok.moe` or :class:`mok.MoELayer` instead.
"""

import torch
from torch import Tensor

from mok import _library  # defines the operators

SPLIT, STACKED, INTERLEAVED = 0, 1, 2
LAYOUTS = {"split": SPLIT, "stacked": STACKED, "interleaved": INTERLEAVED}


@torch.library.register_fake("mok::forward")
def _forward_fake(
    x, topk_ids, topk_weights, w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down,
    shared_gate_vector, main_gate, main_up, main_down, main_shared_gate, main_shared_up,
    main_shared_down, main_shared_gate_vector, workspace, saved_rows, layout, quantized,
):  # fmt: skip
    # With one tensor of another kind PyTorch may come here, where there is nothing to compute.
    for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights),
                         ("w_gate", w_gate), ("w_up", w_up), ("w_shared_gate", w_shared_gate),
                         ("w_shared_up", w_shared_up), ("w_shared_down", w_shared_down),
                         ("shared_gate_vector", shared_gate_vector)):  # fmt: skip
        if tensor is not None and tensor.device != w_down.device:
            raise ValueError(f"{name}: on {tensor.device}, w_down on {w_down.device}")
    tokens, hidden = x.shape
    kept = tokens if saved_rows > 0 else 0
    shared = 0 if w_shared_gate is None else w_shared_gate.shape[0]
    # The parts of `saved`, each a multiple of 64 elements (SavedParts in csrc/ops.cpp).
    rows = saved_rows * w_down.shape[2]
    parts = (rows, rows, kept * shared, kept * shared,
             0 if shared_gate_vector is None else kept * hidden)  # fmt: skip
    saved = sum((part + 63) // 64 * 64 for part in parts)
    return x.new_empty((tokens, hidden)), _routing_hash_fake(topk_ids), x.new_empty((saved,))


def _backward_shapes(x, topk_weights, weights, needs, main_grads):
    grads = [
        x.new_empty(x.shape) if needs & 1 else None,
        topk_weights.new_empty(topk_weights.shape) if needs & 2 else None,
    ]
    for i, (weight, main_grad) in enumerate(zip(weights, main_grads, strict=True)):
        fresh = weight is not None and main_grad is None and needs >> (2 + i) & 1
        grads.append(weight.new_empty(weight.shape) if fresh else None)
    return tuple(grads)


@torch.library.register_fake("mok::forward_eager")
def _forward_eager_fake(
    x, topk_ids, topk_weights, w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down,
    shared_gate_vector, workspace, keep, saved_rows, layout, quantized,
):  # fmt: skip
    y, routing_hash, saved = _forward_fake(
        x, topk_ids, topk_weights, w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down,
        shared_gate_vector, *(None,) * 7, workspace, saved_rows, layout, quantized,
    )  # fmt: skip
    kept = keep and x.device.type == "cpu"
    return y, routing_hash if kept else None, saved if saved_rows > 0 else None


def _in_blocks(grads):
    """The same, in memory as the eager path's operators take it (Allocation in csrc/ops.cpp)."""
    grads = list(grads)
    for places in (slice(2, 5), slice(5, 9)):
        fresh = [grad for grad in grads[places] if grad is not None]
        if len(fresh) < 2:
            continue
        sizes = [(grad.numel() + 255) // 256 * 256 for grad in fresh]
        parts = iter(fresh[0].new_empty((sum(sizes),)).split(sizes))
        grads[places] = [
            grad if grad is None else next(parts)[: grad.numel()].view(grad.shape)
            for grad in grads[places]
        ]
    return tuple(grads)


@torch.library.register_fake("mok::backward")
def _backward_fake(
    d_y, x, topk_ids, topk_weights, w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down,
    shared_gate_vector, routing_hash, saved, workspace, layout, needs, quantized,
):  # fmt: skip
    weights = (w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down, shared_gate_vector)
    return _backward_shapes(x, topk_weights, weights, needs, (None,) * 7)


@torch.library.register_fake("mok::backward_eager")
def _backward_eager_fake(*arguments):
    return _in_blocks(_backward_fake(*arguments))


def _backward_accumulate_shapes(
    d_y, x, topk_ids, topk_weights, w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down,
    shared_gate_vector, routing_hash, saved, workspace, layout, needs, quantized, main_gate,
    main_up, main_down, main_shared_gate, main_shared_up, main_shared_down, main_shared_gate_vector,
):  # fmt: skip
    weights = (w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down, shared_gate_vector)
    main_grads = (
        main_gate, main_up, main_down, main_shared_gate, main_shared_up, main_shared_down,
        main_shared_gate_vector,
    )  # fmt: skip
    return _backward_shapes(x, topk_weights, weights, needs, main_grads)


@torch.library.register_fake("mok::backward_accumulate_eager")
def _backward_accumulate_eager_fake(*arguments):
    return _in_blocks(_backward_accumulate_shapes(*arguments))


@torch.library.register_fake("mok::backward_accumulate")
def _backward_accumulate_fake(d_y, x, topk_ids, topk_weights, *arguments):
    grads = _backward_accumulate_shapes(d_y, x, topk_ids, topk_weights, *arguments)
    nothing = [t.new_empty((0,)) for t in (x, topk_weights, *(x,) * 7)]
    return tuple(n if g is None else g for g, n in zip(grads, nothing, strict=True))


@torch.library.register_fake("mok::routing_hash")
def _routing_hash_fake(topk_ids):
    return topk_ids.new_empty((1 if topk_ids.device.type == "cpu" else 0,), dtype=torch.int64)


# ---- FP8 -------------------------------------------------------------------------------------


def _tiles(size):
    return (size + 127) // 128


def _scales_shape(shape, in_tile: tuple) -> list:
    """Of [M, N] or [E, M, N]: a place for each tile of 128 x 128, of the shape `in_tile`."""
    *count, rows, columns = shape
    return [(count[0] if count else 1) * _tiles(rows), _tiles(columns), *in_tile]


def _register_fakes(name: str, in_tile: tuple) -> None:
    @torch.library.register_fake(f"mok::{name}_quantize")
    def quantize(x_bf16, return_normal, return_transposed):
        *count, rows, columns = x_bf16.shape

        def pair(*shape):
            return (
                x_bf16.new_empty(shape, dtype=torch.float8_e4m3fn),
                x_bf16.new_empty(_scales_shape(shape, in_tile), dtype=torch.uint8),
            )

        normal = pair(*count, rows, columns) if return_normal else (None, None)
        transposed = pair(*count, columns, rows) if return_transposed else (None, None)
        return (*normal, *transposed)

    @torch.library.register_fake(f"mok::{name}_dequantize")
    def dequantize(x_fp8, x_sc):
        return x_fp8.new_empty(x_fp8.shape, dtype=torch.bfloat16)


@torch.library.register_fake("mok::mxfp8_round")
def _mxfp8_round_fake(x_bf16, along_rows, along_columns):
    wanted = (along_rows, along_columns)
    return tuple(x_bf16.new_empty(x_bf16.shape) if want else None for want in wanted)


_MX_TILE, _FP8_TILE = (32, 16), ()
_register_fakes("mxfp8", _MX_TILE)
_register_fakes("fp8", _FP8_TILE)


def _check_matrices(name: str, value, dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: a tensor is needed, not {type(value).__name__}")
    if value.dtype != dtype:
        raise ValueError(f"{name}: dtype {value.dtype}, expected {dtype}")
    if value.dim() not in (2, 3):
        raise ValueError(f"{name}: shape {list(value.shape)}, expected [M, N] or [E, M, N]")
    _library.check_device(name, value.device)


def _check_quantize(x_bf16, return_normal, return_transposed) -> None:
    _check_matrices("x_bf16", x_bf16, torch.bfloat16)
    for name, value in (("return_normal", return_normal), ("return_transposed", return_transposed)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {value!r} is not a bool")


def _check_dequantize(x_fp8, x_sc, in_tile: tuple) -> None:
    _check_matrices("x_fp8", x_fp8, torch.float8_e4m3fn)
    if not isinstance(x_sc, Tensor):
        raise TypeError(f"x_sc: a tensor is needed, not {type(x_sc).__name__}")
    if x_sc.dtype != torch.uint8:
        raise ValueError(f"x_sc: dtype {x_sc.dtype}, expected torch.uint8")
    expected = _scales_shape(x_fp8.shape, in_tile)
    if list(x_sc.shape) != expected:
        raise ValueError(f"x_sc: shape {list(x_sc.shape)}, expected {expected}")


def mxfp8_quantize(
    x_bf16: Tensor, return_normal: bool, return_transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """bf16 -> MXFP8: E4M3 elements in blocks of 32 along the last dimension, E8M0 scales.

    A block's scale is the smallest power of two >= amax / 448, with amax >= 1e-12; elements are
    rounded to nearest, ties to even, and saturate at +-448. docs/numerics.md says what becomes of
    NaN and infinities. The same bits on every device; no gradient.

    Args:
        x_bf16: bf16 [M, N] or [E, M, N], any sizes.
        return_normal: blocks along N.
        return_transposed: blocks along M, of the transposed matrices.

    Returns: (x_fp8, x_sc, x_fp8_t, x_sc_t), None where not asked for.
        x_fp8: float8_e4m3fn of x's shape.
        x_sc: uint8 [E * ceil(M / 128), ceil(N / 128), 32, 16]; in a 128 x 128 tile the scale of row
            r and block b (32 columns) is byte r % 32 * 16 + r // 32 * 4 + b. Blocks outside the
            matrix hold 79, the scale of zeros.
        x_fp8_t: float8_e4m3fn [N, M] or [E, N, M].
        x_sc_t: uint8 [E * ceil(N / 128), ceil(M / 128), 32, 16].

    Raises:
        TypeError: an argument of a wrong Python type.
        ValueError: a wrong dtype, shape or device.
    """
    _check_quantize(x_bf16, return_normal, return_transposed)
    return torch.ops.mok.mxfp8_quantize(x_bf16.detach(), return_normal, return_transposed)


def mxfp8_dequantize(x_fp8: Tensor, x_sc: Tensor) -> Tensor:
    """MXFP8 -> bf16; exact for what :func:`mxfp8_quantize` gives, infinity from 2^128 on.

    Args:
        x_fp8: float8_e4m3fn [M, N] or [E, M, N].
        x_sc: uint8 scales as of :func:`mxfp8_quantize`; 255 makes a block NaN.

    Returns: bf16 of x_fp8's shape. (For x_fp8_t and x_sc_t: the transposed matrices.)

    Raises: as :func:`mxfp8_quantize`.
    """
    _check_dequantize(x_fp8, x_sc, _MX_TILE)
    return torch.ops.mok.mxfp8_dequantize(x_fp8, x_sc)


def fp8_quantize(
    x_bf16: Tensor, return_normal: bool, return_transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """bf16 -> E4M3 in blocks of 128 x 128 with E8M0 scales: the weights of precision fp8.

    Numbers, arguments and errors as of :func:`mxfp8_quantize`; both forms have the same codes.

    Returns: (x_fp8, x_sc, x_fp8_t, x_sc_t), None where not asked for.
        x_fp8, x_fp8_t: float8_e4m3fn [M, N] and [N, M], or with E before.
        x_sc, x_sc_t: uint8 [E * ceil(M / 128), ceil(N / 128)], [E * ceil(N / 128), ceil(M / 128)].
    """
    _check_quantize(x_bf16, return_normal, return_transposed)
    return torch.ops.mok.fp8_quantize(x_bf16.detach(), return_normal, return_transposed)


def fp8_dequantize(x_fp8: Tensor, x_sc: Tensor) -> Tensor:
    """The inverse of :func:`fp8_quantize`, as :func:`mxfp8_dequantize`."""
    _check_dequantize(x_fp8, x_sc, _FP8_TILE)
    return torch.ops.mok.fp8_dequantize(x_fp8, x_sc)


# ---- the choice of experts -------------------------------------------------------------------


def _best_first(scores: Tensor) -> Tensor:
    """Indices that sort the last dimension: largest first, ties to the lower index, NaN last."""
    # -0 and +0 are equal here, and NaN is below -inf only by index; either way the order is total.
    clean = torch.where(scores.isnan(), -torch.inf, scores)
    return torch.sort(clean, dim=-1, descending=True, stable=True).indices


# Not torch.library.custom_op, whose first call imports the compiler (seconds).
_library_fragment = torch.library.Library("mok", "FRAGMENT")
for _name in ("forward_eager", "backward_eager", "backward_accumulate_eager"):
    # Autograd has no part in them: they are called inside an autograd.Function, or for no gradient.
    _library_fragment.impl(_name, torch.library.fallthrough_kernel, "Autograd")
_library_fragment.define(
    "select_experts(Tensor scores, int topk, int groups, int topk_groups, str group_score) "
    "-> Tensor"
)


def _select_experts(scores, topk, groups, topk_groups, group_score):
    tokens, experts = scores.shape
    if groups > 1:
        width = experts // groups
        grouped = torch.where(scores.isnan(), -torch.inf, scores).view(tokens, groups, width)
        if group_score == "top2":
            group_scores = grouped.topk(min(2, width), dim=-1).values.sum(-1)
        else:
            group_scores = grouped.amax(-1)
        taken = _best_first(group_scores)[:, :topk_groups].sort(dim=-1).values  # [T, topk_groups]
        inside = torch.arange(width, device=scores.device)
        candidates = (taken.unsqueeze(-1) * width + inside).flatten(1)  # ascending expert ids
        best = _best_first(scores.gather(1, candidates))[:, :topk]
        return candidates.gather(1, best)
    return _best_first(scores)[:, :topk].contiguous()


_library_fragment.impl("select_experts", _select_experts, "CompositeExplicitAutograd")


@torch.library.register_fake("mok::select_experts")
def _select_experts_fake(scores, topk, groups, topk_groups, group_score):
    return scores.new_empty((scores.shape[0], topk), dtype=torch.int64)


def select_experts(
    scores: Tensor, topk: int, groups: int, topk_groups: int, group_score: str
) -> Tensor:
    """Ids of the K best experts of each row, best first.

    An operator of its own, so that a checkpoint policy can name it (see :mod:`mok.checkpoint`).

    Args:
        scores: [T, E] floating point; what the choice is made by (bias included).
        topk: K.
        groups, topk_groups: the experts stand in ``groups`` equal groups, and only those of the
            ``topk_groups`` best groups can be chosen; 1, 1 = no groups.
        group_score: "top2" (the sum of a group's two best scores) or "max".

    Returns: int64 [T, K], distinct within a row whatever the scores are. Equal scores: the lower
    index wins. NaN counts as -inf.
    """
    return torch.ops.mok.select_experts(scores, topk, groups, topk_groups, group_score)
