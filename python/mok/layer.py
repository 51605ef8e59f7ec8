"""The layer as a module: experts, an optional shared expert and the router."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mok.autograd import DTYPES, _local, moe
from mok.group import Group, default_group
from mok.models import preset
from mok.ops import LAYOUTS
from mok.precision import (
    QUANTIZED,
    QuantizedWeights,
    RoundedWeights,
    checked_precision,
    quantize_weights,
)
from mok.router import RouterConfig, expert_counts, route


class Routing(NamedTuple):
    """What the router did; for balancing losses and statistics. [...] as x's leading dimensions."""

    logits: Tensor | None  # [..., E] fp32; None where ids and weights came from outside
    probabilities: Tensor | None  # [..., E] the scores; masked tokens are among them
    counts: Tensor  # int64 [E], slots of this rank per expert, without masked tokens
    topk_ids: Tensor  # [..., K]
    topk_weights: Tensor  # [..., K]


class MoELayer(nn.Module):
    """A mixture-of-experts layer whose experts are spread over the ranks of an EP group.

    Every rank of the group makes the same calls, with any number of tokens. The module holds
    parameters only; what a call needs lives in the call. Expert parameters are this rank's own
    (see ``expert_parameters``); all others are replicated, and their gradients are of this rank's
    tokens, to be averaged by the data-parallel code.

    Parameters (E_local = E / R): ``w_gate``, ``w_up`` [E_local, I, H], or with another layout
    ``w_gate_up`` [E_local, 2I, H]; ``w_down`` [E_local, H, I]; ``w_shared_gate``, ``w_shared_up``
    [I_s, H], ``w_shared_down`` [H, I_s], ``shared_gate_vector`` [1, H]; ``router_weight`` [E, H]
    fp32. Buffer ``router_bias`` [E] fp32, if the router has one.

    Initial values depend on PyTorch's seed, the kind of device and the global expert, not on R;
    seed all ranks alike.

    Args:
        hidden, intermediate, experts, topk: H, I, E (of all ranks), K.
        shared_intermediate: I_s; 0 = no shared expert.
        shared_gate: the shared expert's output is scaled by sigmoid(x . shared_gate_vector).
        swiglu_limit: L of silu(min(g, L)) * clamp(u, -L, L).
        router: how logits become ids and weights; None: they are given to ``forward``.
        layout: "split", "stacked" or "interleaved"; see :func:`mok.moe`.
        accumulate_into_main_grad: see ``accumulate`` of :func:`mok.moe`.
        compute_dtype: the experts' weights are converted to it at each call; None: they are used as
            they are.
        precision: None: the weights' dtype; or "bf16", "mxfp8", "fp8", all of bf16 weights; see
            :func:`mok.moe`. The FP8 weights are kept, and made anew when PyTorch's version counter
            says that a parameter has changed (under torch.compile and in a CUDA graph: at each
            call). It does not see writes through ``parameter.data``: call :meth:`requantize` after
            those.
        group: the EP group; default: that of :func:`mok.init`.
        device, dtype: of the experts' weights (bf16, fp32 or fp64).

    Raises:
        ValueError, TypeError: naming the argument.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        topk: int,
        *,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        swiglu_limit: float | None = None,
        router: RouterConfig | None = RouterConfig(),  # noqa: B008  (frozen)
        layout: str = "split",
        accumulate_into_main_grad: bool = False,
        compute_dtype: torch.dtype | None = None,
        precision: str | None = None,
        group: Group | None = None,
        device=None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if group is not None and not isinstance(group, Group):
            raise TypeError(f"group: {group!r} is no mok.Group")
        for name, value in (
            ("hidden", hidden),
            ("intermediate", intermediate),
            ("experts", experts),
            ("topk", topk),
            ("shared_intermediate", shared_intermediate),
        ):
            if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
                raise TypeError(f"{name}: {value!r} is not an integer")
        for name, value in (
            ("shared_gate", shared_gate),
            ("accumulate_into_main_grad", accumulate_into_main_grad),
        ):
            if not isinstance(value, bool):
                raise TypeError(f"{name}: {value!r} is not a bool")
        for name, value in (("hidden", hidden), ("intermediate", intermediate)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not positive")
        ranks = (group or default_group()).ranks
        if experts < 1 or experts % ranks:
            raise ValueError(f"experts: {experts} is not a multiple of the group's {ranks} ranks")
        if not 1 <= topk <= min(experts, 64):
            raise ValueError(f"topk: {topk} is not in 1..{min(experts, 64)}")
        if shared_intermediate < 0:
            raise ValueError(f"shared_intermediate: {shared_intermediate} is negative")
        if shared_gate and not shared_intermediate:
            raise ValueError("shared_gate: there is no shared expert to scale")
        if swiglu_limit is not None:
            if isinstance(swiglu_limit, bool) or not isinstance(swiglu_limit, int | float):
                raise TypeError(f"swiglu_limit: {swiglu_limit!r} is not a number")
            if not swiglu_limit > 0:
                raise ValueError(f"swiglu_limit: {swiglu_limit} is not positive")
        if not isinstance(layout, str):
            raise TypeError(f"layout: {layout!r} is not a string")
        if layout not in LAYOUTS:
            raise ValueError(f"layout: {layout!r} is none of {', '.join(LAYOUTS)}")
        for name, value in (("dtype", dtype), ("compute_dtype", compute_dtype)):
            if value is not None and value not in DTYPES:
                raise TypeError(f"{name}: {value} is none of {DTYPES}")
        if router is not None:
            if not isinstance(router, RouterConfig):
                raise TypeError(f"router: {router!r} is no RouterConfig")
            router.check(experts, topk)
        if device is not None:
            if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
                raise TypeError(f"device: {device!r} is no device")
            try:
                torch.device(device)
            except RuntimeError as error:
                raise ValueError(f"device: {error}") from None
        dtype = dtype or torch.get_default_dtype()
        if dtype not in DTYPES:
            raise TypeError(f"dtype: the default, {dtype}, is none of {DTYPES}")
        if checked_precision(precision) and (compute_dtype or dtype) != torch.bfloat16:
            raise ValueError(
                f"precision: {precision} is of bf16 weights, not {compute_dtype or dtype}; give "
                "dtype or compute_dtype torch.bfloat16"
            )
        self.group = group
        self.hidden, self.intermediate, self.experts, self.topk = (
            hidden,
            intermediate,
            experts,
            topk,
        )
        self.shared_intermediate = shared_intermediate
        self.swiglu_limit = swiglu_limit
        self.router = router
        self.layout = layout
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.compute_dtype = compute_dtype
        self.precision = precision
        self._quantized = None  # (what the parameters were, their FP8 form)

        def parameter(*shape, dtype=dtype):
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        local = experts // ranks
        if layout == "split":
            self.w_gate = parameter(local, intermediate, hidden)
            self.w_up = parameter(local, intermediate, hidden)
        else:
            self.w_gate_up = parameter(local, 2 * intermediate, hidden)
        self.w_down = parameter(local, hidden, intermediate)
        for name, shape in (
            ("w_shared_gate", (shared_intermediate, hidden)),
            ("w_shared_up", (shared_intermediate, hidden)),
            ("w_shared_down", (hidden, shared_intermediate)),
        ):
            self.register_parameter(name, parameter(*shape) if shared_intermediate else None)
        self.register_parameter("shared_gate_vector", parameter(1, hidden) if shared_gate else None)
        router_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.register_parameter(
            "router_weight", parameter(experts, hidden, dtype=router_dtype) if router else None
        )
        bias = None
        if router is not None and router.bias:
            bias = torch.zeros(experts, device=device, dtype=router_dtype)
        self.register_buffer("router_bias", bias)
        self.reset_parameters()

    @classmethod
    def from_preset(cls, name: str, **settings) -> "MoELayer":
        """The layer of a published model (see ``mok.models.PRESETS``); settings go before it.

        Raises ValueError, which lists the names.
        """
        if not isinstance(name, str):
            raise TypeError(f"name: {name!r} is not a string")
        p = preset(name)
        fields = {
            "hidden": p.hidden,
            "intermediate": p.intermediate,
            "experts": p.experts,
            "topk": p.topk,
            "shared_intermediate": p.shared_intermediate,
            "shared_gate": p.shared_gate,
            "swiglu_limit": p.swiglu_limit,
            "router": p.router,
        }
        return cls(**{**fields, **settings})

    def expert_parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's own experts: not replicated, not to be averaged."""
        names = ("w_gate", "w_up", "w_gate_up", "w_down")
        return [p for name, p in self.named_parameters(recurse=False) if name in names]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal values of variance 1 / fan-in. Draws one number of PyTorch's generator."""
        if self.w_down.device.type == "meta":
            return
        base = int(torch.randint(2**62, ()))
        rank = (self.group or default_group()).rank
        local = self.w_down.shape[0]

        def fill(tensor: Tensor, key: int) -> None:
            generator = torch.Generator(tensor.device).manual_seed((base + key) % 2**63)
            values = torch.randn(tensor.shape, generator=generator, device=tensor.device)
            tensor.copy_(values * tensor.shape[-1] ** -0.5)

        for i in range(local):
            key = 8 * (rank * local + i + 1)
            if self.layout == "split":
                fill(self.w_gate[i], key)
                fill(self.w_up[i], key + 1)
            elif self.layout == "stacked":
                fill(self.w_gate_up[i, : self.intermediate], key)
                fill(self.w_gate_up[i, self.intermediate :], key + 1)
            else:
                fill(self.w_gate_up[i, 0::2], key)
                fill(self.w_gate_up[i, 1::2], key + 1)
            fill(self.w_down[i], key + 2)
        others = ("w_shared_gate", "w_shared_up", "w_shared_down", "shared_gate_vector")
        for key, name in enumerate((*others, "router_weight")):
            tensor = getattr(self, name)
            if tensor is not None:
                fill(tensor, key)

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        return_routing: bool = False,
    ) -> Tensor | tuple[Tensor, Routing]:
        """Collective over the group, as is its backward.

        Args:
            x: [..., H], of the weights' dtype (any under autocast).
            token_mask: bool [...]; a token that is False goes to no routed expert, and counts
                nowhere. The shared expert sees it.
            topk_ids, topk_weights: [..., K], instead of the router's; see :func:`mok.moe`.
            return_routing: also return a :class:`Routing`.

        Returns: y [..., H] of x's dtype, or (y, Routing).

        Raises: as :func:`mok.moe`.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x: {type(x).__name__}, expected a tensor")
        if x.device.type != self.w_down.device.type:
            raise ValueError(f"x: on {x.device}, the weights on {self.w_down.device}")
        lead = x.shape[:-1]
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ValueError(f"x: shape {list(x.shape)}, expected [..., {self.hidden}]")
        flat = x.reshape(-1, self.hidden)
        mask = None
        if token_mask is not None:
            if token_mask.dtype != torch.bool:
                raise TypeError(f"token_mask: dtype {token_mask.dtype}, expected torch.bool")
            if token_mask.shape != lead:
                raise ValueError(
                    f"token_mask: shape {list(token_mask.shape)}, expected {list(lead)}"
                )
            mask = token_mask.reshape(-1)
        if (topk_ids is None) != (topk_weights is None):
            raise ValueError("topk_ids, topk_weights: give both or neither")

        logits = scores = None
        if topk_ids is not None:
            ids = topk_ids.reshape(-1, topk_ids.shape[-1])
            weights = topk_weights.reshape(-1, topk_weights.shape[-1])
            if mask is not None:
                ids = torch.where(mask.unsqueeze(-1), ids, -1)
        elif self.router is None:
            raise ValueError("topk_ids, topk_weights: needed, for the layer has no router")
        else:
            logits = self.router_logits(flat, mask)
            ids, weights, scores = route(
                logits, self.topk, self.router, bias=self.router_bias, token_mask=mask
            )

        dtype = self.compute_dtype
        experts = (self.w_gate, self.w_up) if self.layout == "split" else (self.w_gate_up, None)
        tensors = (
            *experts, self.w_down, self.w_shared_gate, self.w_shared_up, self.w_shared_down,
            self.shared_gate_vector,
        )  # fmt: skip
        parameters = tensors
        if dtype is not None:
            tensors = tuple(None if w is None else w.to(dtype) for w in tensors)
            flat = flat.to(dtype)
        y = moe(
            flat, ids, weights, *tensors, swiglu_limit=self.swiglu_limit, layout=self.layout,
            accumulate=self.accumulate_into_main_grad, accumulate_from=parameters,
            precision=self.precision, quantized=self._quantized_weights(tensors), group=self.group,
        ).view(x.shape)  # fmt: skip
        if not return_routing:
            return y
        counts = expert_counts(ids, self.experts)
        if logits is not None:
            logits = logits.view(*lead, self.experts)
            scores = scores.view(*lead, self.experts)
        return y, Routing(logits, scores, counts, ids.view(*lead, -1), weights.view(*lead, -1))

    def requantize(self) -> None:
        """Forgets the FP8 weights; the next call makes them anew."""
        self._quantized = None

    def _quantized_weights(self, tensors: tuple) -> QuantizedWeights | RoundedWeights | None:
        """Of the weights that are multiplied; those kept, unless a parameter has changed."""
        if self.precision not in QUANTIZED or torch.compiler.is_compiling():
            return None  # moe quantises
        if self.w_down.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # the weights may change between replays
        with torch.no_grad():
            parameters = [_local(p) for p in self.expert_parameters()]
            state = [self.precision, *((p.data_ptr(), p._version) for p in parameters)]
            if self._quantized is None or self._quantized[0] != state:
                weights = [None if w is None else _local(w) for w in tensors[:3]]
                fp8 = quantize_weights(self.precision, *weights, layout=self.layout)
                self._quantized = state, fp8
        return self._quantized[1]

    def router_logits(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """x [T, H] -> logits [T, E], in fp32 (fp64 for fp64) under autocast too."""
        if token_mask is not None:  # a masked token may hold NaN, which 0 * NaN would pass on
            x = torch.where(token_mask.unsqueeze(-1), x, 0.0)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(self.router_weight.dtype), self.router_weight)

    def extra_repr(self) -> str:
        text = f"hidden={self.hidden}, intermediate={self.intermediate}, experts={self.experts}"
        text += f", topk={self.topk}"
        if self.shared_intermediate:
            text += f", shared_intermediate={self.shared_intermediate}"
        if self.router is not None:
            text += f", scoring={self.router.scoring}"
        if self.precision is not None:
            text += f", precision={self.precision}"
        return text
