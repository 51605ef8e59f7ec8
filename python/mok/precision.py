"""Precisions mxfp8 and fp8: which there are, and the routed weights in FP8."""

from typing import NamedTuple

import torch
from torch import Tensor

QUANTIZED = ("mxfp8", "fp8")
PRECISIONS = ("bf16", *QUANTIZED)


class QuantizedWeights(NamedTuple):
    """The routed weights in FP8, each as data (float8_e4m3fn) and scales (uint8 E8M0).

    Forward reads ``gate``, ``up`` and ``down``; backward the ``*_t``, which are quantised along the
    transposed matrices, and ``gate`` and ``up`` for rows that it recomputes. Scales are laid out as
    :func:`mok.ops.mxfp8_quantize` and :func:`mok.ops.fp8_quantize` say.
    """

    gate: Tensor  # [E_local, I, H]
    gate_scales: Tensor
    up: Tensor  # [E_local, I, H]
    up_scales: Tensor
    down: Tensor  # [E_local, H, I]
    down_scales: Tensor
    gate_t: Tensor  # [E_local, H, I]
    gate_t_scales: Tensor
    up_t: Tensor  # [E_local, H, I]
    up_t_scales: Tensor
    down_t: Tensor  # [E_local, I, H]
    down_t_scales: Tensor


class RoundedWeights(NamedTuple):
    """The routed weights as products of mxfp8 read them on GPUs: bf16, each element the number that
    its E4M3 code and scale stand for.

    Forward reads ``gate``, ``up`` and ``down``, rounded in blocks along the last dimension;
    backward the others, rounded along the one before, and ``gate`` and ``up`` for rows that it
    recomputes.
    """

    gate: Tensor  # [E_local, I, H]
    up: Tensor  # [E_local, I, H]
    down: Tensor  # [E_local, H, I]
    gate_backward: Tensor  # [E_local, I, H]
    up_backward: Tensor  # [E_local, I, H]
    down_backward: Tensor  # [E_local, H, I]


def checked_precision(precision) -> str | None:
    if precision is not None and not isinstance(precision, str):
        raise TypeError(f"precision: {precision!r} is not a string")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is none of {', '.join(PRECISIONS)}")
    return precision


def split_gate_up(w_gate: Tensor, w_up: Tensor | None, layout: str) -> tuple[Tensor, Tensor]:
    """Views of gate and up [E_local, I, H], however they are laid out (see :func:`mok.moe`)."""
    if layout == "stacked":
        inner = w_gate.shape[1] // 2
        return w_gate[:, :inner], w_gate[:, inner:]
    if layout == "interleaved":
        return w_gate[:, 0::2], w_gate[:, 1::2]
    return w_gate, w_up


@torch.no_grad()
def quantize_weights(
    precision: str, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, *, layout: str = "split"
) -> QuantizedWeights | RoundedWeights:
    """The routed weights in FP8, for ``quantized`` of :func:`mok.moe`; on a GPU in mxfp8 their
    numbers in bf16, which is what its products read.

    To be made anew whenever the weights change; nothing else notices.

    Args:
        precision: "mxfp8" or "fp8".
        w_gate, w_up, w_down, layout: bf16, as of :func:`mok.moe`.

    Raises TypeError and ValueError, which name the argument.
    """
    if precision not in QUANTIZED:
        raise ValueError(f"precision: {precision!r} is none of {', '.join(QUANTIZED)}")
    quantize = torch.ops.mok.mxfp8_quantize if precision == "mxfp8" else torch.ops.mok.fp8_quantize
    gate, up = split_gate_up(w_gate, w_up, layout)
    if precision == "mxfp8" and w_down.is_cuda:
        pairs = [torch.ops.mok.mxfp8_round(w.detach(), True, True) for w in (gate, up, w_down)]
        return RoundedWeights(*(pair[0] for pair in pairs), *(pair[1] for pair in pairs))
    pairs = [quantize(weight.detach(), True, True) for weight in (gate, up, w_down)]
    normal = [tensor for pair in pairs for tensor in pair[:2]]
    transposed = [tensor for pair in pairs for tensor in pair[2:]]
    return QuantizedWeights(*normal, *transposed)


def for_backward(quantized) -> list[Tensor]:
    """What the operator ``backward`` takes of the twelve tensors, or of six: all but ``down``."""
    if len(quantized) == len(RoundedWeights._fields):
        return [*quantized[:2], *quantized[3:]]
    return [*quantized[:4], *quantized[6:]]
