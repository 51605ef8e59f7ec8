"""Checks of what is given to :mod:`mok.functional`; see there for the exceptions."""

import torch
from torch import Tensor

from mok.autograd import DTYPES, _local

FP8 = torch.float8_e4m3fn

_NAMES = (
    "shared_gate_weights",
    "shared_up_weights",
    "shared_down_weights",
    "routed_gate_weights",
    "routed_up_weights",
    "routed_down_weights",
)


def _wrong(name: str, value, shape: tuple, letters: str, dtype, device) -> Exception | None:
    if not isinstance(value, Tensor):
        return TypeError(f"{name}: {type(value).__name__}, expected a tensor")
    if value.device != device:
        return ValueError(f"{name}: on {value.device}, the workspace is on {device}")
    if value.dtype != dtype:
        return ValueError(f"{name}: dtype {value.dtype}, expected {dtype}")
    if value.shape != shape:
        return ValueError(f"{name}: shape {list(value.shape)}, expected {letters} = {list(shape)}")
    return None


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# What a tuple of an MXFP8 weight holds, by its direction: data, scale, transposed data and scale.
_NORMAL, _TRANSPOSED, _BOTH = (0, 1), (2, 3), (0, 1, 2, 3)
FORWARD = (_NORMAL, _NORMAL, _NORMAL)  # of gate, up, down
RECOMPUTE = (_NORMAL, _NORMAL)
BACKWARD = (_BOTH, _BOTH, _TRANSPOSED)
_PARTS = ("data", "scale", "data_T", "scale_T")


def _mxfp8(workspace, routed: tuple, parts: tuple) -> tuple[list[Tensor], tuple]:
    """The tensors in all tuples, in the operators' order, and what stands for bf16 weights."""
    hidden = workspace.hidden_size
    names = _NAMES[3:]
    for name, weight, held in zip(names, routed, parts, strict=False):
        if not isinstance(weight, tuple):
            raise TypeError(f"{name}: {type(weight).__name__}, expected a tuple as the others are")
        if len(weight) != len(held):
            wanted = ", ".join(_PARTS[part] for part in held)
            raise ValueError(f"{name}: a tuple of {len(weight)}, expected ({wanted})")
    check_type(f"{names[0]}[0]", routed[0][0], Tensor)
    if routed[0][0].dim() != 3:
        shape = list(routed[0][0].shape)
        raise ValueError(f"{names[0]}[0]: shape {shape}, expected [E_local, I, H]")
    experts, inner, _ = routed[0][0].shape
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    pairs = {}  # by (transposed, weight)
    stand_ins = []
    for i, (name, weight, held) in enumerate(zip(names, routed, parts, strict=False)):
        for place, part in enumerate(held):
            rows, columns = shapes[i] if part < 2 else shapes[i][::-1]
            full = f"{name}[{place}]"
            if part % 2 == 0:
                shape, letters, dtype = (experts, rows, columns), "[E_local, ...]", FP8
            else:
                shape = (experts * -(-rows // 128), -(-columns // 128), 32, 16)
                letters, dtype = "scales", torch.uint8
            wrong = _wrong(full, weight[place], shape, letters, dtype, workspace.device)
            if wrong is not None:
                raise wrong
            pairs[part // 2, i, part % 2] = weight[place]
        # Not read; the gradient has its shape and dtype.
        one = weight[0].new_empty(1, dtype=torch.bfloat16)
        stand_ins.append(one.expand(experts, *shapes[i]))
    return [pairs[key] for key in sorted(pairs)], tuple(stand_ins)


class Weights:
    """The six weights and the gate vector, checked; raises for those that do not fit.

    Attributes:
        tensors: the seven, in the operators' order; MXFP8 weights: what stands for them.
        precision: "mxfp8", or None: that of `dtype`.
        quantized: what the operators take besides; None unless MXFP8.
    """

    def __init__(self, workspace, shared, routed, gate_vector, parts):
        self.precision, self.quantized = None, None
        if any(isinstance(weight, tuple) for weight in routed):
            self.precision = "mxfp8"
            self.quantized, routed = _mxfp8(workspace, tuple(routed), parts)
        shared = tuple(_local(weight) for weight in shared)
        routed = tuple(_local(weight) for weight in routed)
        gate_vector = _local(gate_vector)
        gate = routed[0]
        check_type(_NAMES[3], gate, Tensor)
        if gate.dim() != 3:
            raise ValueError(f"{_NAMES[3]}: shape {list(gate.shape)}, expected [E_local, I, H]")
        if gate.dtype not in DTYPES:
            raise ValueError(f"{_NAMES[3]}: dtype {gate.dtype}, expected torch.bfloat16")
        hidden, device = workspace.hidden_size, workspace.device
        if device.type == "cuda" and gate.dtype != torch.bfloat16:
            raise ValueError(f"{_NAMES[3]}: dtype {gate.dtype}, expected torch.bfloat16 (on a GPU)")
        self.dtype = gate.dtype
        self.experts, self.inner, _ = gate.shape
        given = [weight is not None for weight in shared]
        if any(given) != all(given):
            raise ValueError(f"{', '.join(_NAMES[: len(shared)])}: give all of them or none")
        self.shared_inner = 0
        if any(given):
            check_type(_NAMES[0], shared[0], Tensor)
            self.shared_inner = shared[0].shape[0] if shared[0].dim() == 2 else 0
        elif gate_vector is not None:
            raise ValueError("shared_gate_vector: given without a shared expert")
        s, e, i = self.shared_inner, self.experts, self.inner
        expected = {
            _NAMES[0]: ((s, hidden), "[I_s, H]"),
            _NAMES[1]: ((s, hidden), "[I_s, H]"),
            _NAMES[2]: ((hidden, s), "[H, I_s]"),
            _NAMES[3]: ((e, i, hidden), "[E_local, I, H]"),
            _NAMES[4]: ((e, i, hidden), "[E_local, I, H]"),
            _NAMES[5]: ((e, hidden, i), "[E_local, H, I]"),
            "shared_gate_vector": ((1, hidden), "[1, H]"),
        }
        named = (*zip(_NAMES, shared), *zip(_NAMES[3:], routed))  # noqa: B905
        for name, weight in (*named, ("shared_gate_vector", gate_vector)):
            if weight is None and not name.startswith("routed"):
                continue
            wrong = _wrong(name, weight, *expected[name], self.dtype, device)
            if wrong is not None:
                raise wrong
        self.gated = gate_vector is not None
        # In the operators' order.
        self.tensors = (*routed, *shared, gate_vector)


def checked_limit(swiglu_limit) -> float | None:
    if swiglu_limit is None:
        return None
    if isinstance(swiglu_limit, bool) or not isinstance(swiglu_limit, int | float):
        raise TypeError(f"swiglu_limit: {swiglu_limit!r} is not a number")
    if not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit: {swiglu_limit} is not positive")
    return float(swiglu_limit)


def wrong_inputs(workspace, schedule, dtype, x, router_weights, grad_output) -> Exception | None:
    device = workspace.device
    tokens = schedule.top_experts.shape[0]
    shape = (tokens, workspace.hidden_size)
    wrong = _wrong("x", x, shape, "[T, H]", dtype, device)
    if wrong is None and router_weights is not None:
        wrong = _wrong(
            "router_weights", router_weights, (tokens, workspace.topk), "[T, K]",
            _sum_dtype(dtype), device,
        )  # fmt: skip
    if wrong is None and grad_output is not None:
        wrong = _wrong("grad_output", grad_output, shape, "[T, H]", dtype, device)
    return wrong


def check_integer(name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} is not an integer")
    if value < least:
        raise ValueError(f"{name}: {value} is less than {least}")


def check_type(name: str, value, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: {type(value).__name__}, expected {kind.__name__}")


def checked_main_grads(weights: Weights, main_grads, device) -> tuple:
    """In the operators' order."""
    if main_grads is None:
        return (None,) * 7
    count = 7 if weights.gated else 6
    check_type("main_grads", main_grads, tuple)
    if len(main_grads) != count:
        raise ValueError(f"main_grads: {len(main_grads)} of {count} weights")
    targets = (*main_grads[3:6], *main_grads[:3], main_grads[6] if weights.gated else None)
    for i, (target, weight) in enumerate(zip(targets, weights.tensors, strict=True)):
        if target is None:
            continue
        name = f"main_grads[{(*range(3, 6), *range(3), 6)[i]}]"
        if weight is None:
            raise ValueError(f"{name}: given, but there is no such weight")
        dtype = _sum_dtype(weights.dtype)
        wrong = _wrong(name, target, weight.shape, "the weight's shape", dtype, device)
        if wrong is None and target.requires_grad:
            wrong = ValueError(f"{name}: must not require grad")
        if wrong is None and target.shape[-1] > 1 and target.stride(-1) != 1:
            wrong = ValueError(f"{name}: its rows must be contiguous")
        if wrong is not None:
            raise wrong
    return targets
