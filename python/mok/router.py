"""From router logits to the ids and weights of the experts that each token goes to."""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from mok.ops import select_experts

SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")


@dataclass(frozen=True)
class RouterConfig:
    """How a model turns logits into top-k ids and weights.

    Attributes:
        scoring: "softmax" (over all experts), "sigmoid" or "sqrt_softplus".
        renormalise: divide the chosen weights by their sum. With K = 1 the weight is then the
            constant 1, and the router learns nothing from the output.
        scale: factor of the weights, after renormalisation.
        groups, topk_groups: experts stand in ``groups`` equal groups; only the best ``topk_groups``
            of them can be chosen from (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        group_score: a group's score: "top2", the sum of its two best experts, or "max".
        bias: whether there is a bias per expert that is added for the choice alone.
    """

    scoring: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2"
    bias: bool = False

    def check(self, experts: int, topk: int) -> None:
        """Raises TypeError or ValueError, naming the field, unless `topk` can be chosen."""
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
            if not fits or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"{field.name}: {value!r} is no {kind.__name__}")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring: {self.scoring!r} is none of {', '.join(SCORINGS)}")
        if self.group_score not in ("top2", "max"):
            raise ValueError(f"group_score: {self.group_score!r} is neither 'top2' nor 'max'")
        if self.groups < 1 or experts % self.groups:
            raise ValueError(f"groups: {self.groups} does not divide {experts} experts")
        if not 1 <= self.topk_groups <= self.groups:
            raise ValueError(f"topk_groups: {self.topk_groups} is not in 1..{self.groups}")
        if not 1 <= topk <= experts * self.topk_groups // self.groups:
            raise ValueError(
                f"topk: {topk} is not in 1..{experts * self.topk_groups // self.groups}"
            )


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """logits [T, E] -> scores [T, E]; fp32, or fp64 for fp64 logits."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    if scoring == "softmax":
        return logits.softmax(dim=-1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    return F.softplus(logits).sqrt()


def route(
    logits: Tensor,
    topk: int,
    config: RouterConfig | None = None,
    *,
    bias: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses experts.

    Args:
        logits: [T, E], any floating point dtype; computed with in fp32 (fp64 if it is fp64).
        topk: K.
        config: how; default ``RouterConfig()``.
        bias: [E]; added to the scores for the choice, not in the weights. Gets no gradient.
        token_mask: bool [T]; a token that is False goes nowhere (ids -1, weights 0).

    Returns:
        ids int64 [T, K] (best first, equal scores to the lower index, distinct also in rows of NaN
        or infinities), weights [T, K] and scores [T, E], both fp32 or fp64. Differentiable with
        respect to logits through weights and scores.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    config = config or RouterConfig()
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError("logits: a floating point tensor is needed")
    if logits.dim() != 2:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected [T, E]")
    tokens, experts = logits.shape
    config.check(experts, topk)
    if bias is not None and tuple(bias.shape) != (experts,):
        raise ValueError(f"bias: shape {tuple(bias.shape)}, expected [{experts}]")
    if token_mask is not None:
        if token_mask.dtype != torch.bool:
            raise TypeError(f"token_mask: dtype {token_mask.dtype}, expected torch.bool")
        if token_mask.shape != (tokens,):
            raise ValueError(f"token_mask: shape {tuple(token_mask.shape)}, expected [{tokens}]")

    if (
        token_mask is not None
    ):  # a masked row may hold NaN, which 0 * NaN would pass to the gradient
        logits = torch.where(token_mask.unsqueeze(-1), logits, 0.0)

    scores = scores_of(logits, config.scoring)
    choice = scores.detach()
    if bias is not None:
        choice = choice + bias.detach().to(choice.dtype)
    ids = select_experts(choice, topk, config.groups, config.topk_groups, config.group_score)
    weights = scores.gather(1, ids)
    if config.renormalise:
        # Scores are not negative; the floor only keeps an all-zero row from 0 / 0.
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)
    if config.scale != 1.0:
        weights = weights * config.scale
    if token_mask is not None:
        keep = token_mask.unsqueeze(-1)
        ids = torch.where(keep, ids, -1)
        weights = torch.where(keep, weights, 0.0)
    return ids, weights, scores


def expert_counts(ids: Tensor, experts: int) -> Tensor:
    """How many slots go to each expert, int64 [E]; ids of -1 are not counted."""
    flat = ids.flatten()
    # One more bin takes the -1s.
    bins = torch.where(flat < 0, experts, flat).to(torch.int64)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, bins, torch.ones_like(bins))[:experts]
