"""The operators of libmok_torch.so: fake kernels, and the choice of experts.

``torch.ops.mok.forward``, ``backward`` and ``backward_accumulate`` are defined in C++ and known
here by their outputs' shapes alone, so that they trace with symbolic T. They keep no Python state:
a workspace is an integer. Most code calls :func:`mok.moe` or :class:`mok.MoELayer` instead.
"""

import torch
from torch import Tensor

from mok import _library  # noqa: F401  (defines the operators)

SPLIT, STACKED, INTERLEAVED = 0, 1, 2
LAYOUTS = {"split": SPLIT, "stacked": STACKED, "interleaved": INTERLEAVED}


@torch.library.register_fake("mok::forward")
def _forward_fake(
    x, topk_ids, topk_weights, w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down,
    shared_gate_vector, main_gate, main_up, main_down, main_shared_gate, main_shared_up,
    main_shared_down, main_shared_gate_vector, workspace, saved_rows, layout,
):  # fmt: skip
    tokens, hidden = x.shape
    inner = w_down.shape[2]
    kept = tokens if saved_rows > 0 else 0
    shared = 0 if w_shared_gate is None else w_shared_gate.shape[0]
    return (
        x.new_empty((tokens, hidden)),
        x.new_empty((1,), dtype=torch.int64),
        x.new_empty((saved_rows, inner)),
        x.new_empty((saved_rows, inner)),
        x.new_empty((kept, shared)),
        x.new_empty((kept, shared)),
        x.new_empty((0 if shared_gate_vector is None else kept, hidden)),
    )


def _backward_shapes(x, topk_weights, weights, needs, main_grads):
    tokens, hidden = x.shape
    grads = [
        x.new_empty((tokens, hidden) if needs & 1 else (0,)),
        topk_weights.new_empty(topk_weights.shape if needs & 2 else (0,)),
    ]
    for i, (weight, main_grad) in enumerate(zip(weights, main_grads, strict=True)):
        fresh = weight is not None and main_grad is None and needs >> (2 + i) & 1
        grads.append(weight.new_empty(weight.shape) if fresh else x.new_empty((0,)))
    return tuple(grads)


@torch.library.register_fake("mok::backward")
def _backward_fake(
    d_y, x, topk_ids, topk_weights, w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down,
    shared_gate_vector, routing_hash, saved_gate, saved_up, saved_shared_gate, saved_shared_up,
    saved_shared_out, workspace, layout, needs,
):  # fmt: skip
    weights = (w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down, shared_gate_vector)
    return _backward_shapes(x, topk_weights, weights, needs, (None,) * 7)


@torch.library.register_fake("mok::backward_accumulate")
def _backward_accumulate_fake(
    d_y, x, topk_ids, topk_weights, w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down,
    shared_gate_vector, routing_hash, saved_gate, saved_up, saved_shared_gate, saved_shared_up,
    saved_shared_out, workspace, layout, needs, main_gate, main_up, main_down, main_shared_gate,
    main_shared_up, main_shared_down, main_shared_gate_vector,
):  # fmt: skip
    weights = (w_gate, w_up, w_down, w_shared_gate, w_shared_up, w_shared_down, shared_gate_vector)
    main_grads = (
        main_gate, main_up, main_down, main_shared_gate, main_shared_up, main_shared_down,
        main_shared_gate_vector,
    )  # fmt: skip
    return _backward_shapes(x, topk_weights, weights, needs, main_grads)


def _best_first(scores: Tensor) -> Tensor:
    """Indices that sort the last dimension: largest first, ties to the lower index, NaN last."""
    # -0 and +0 are equal here, and NaN is below -inf only by index; either way the order is total.
    clean = torch.where(scores.isnan(), -torch.inf, scores)
    return torch.sort(clean, dim=-1, descending=True, stable=True).indices


# Not torch.library.custom_op, whose first call imports the compiler (seconds).
_library_fragment = torch.library.Library("mok", "FRAGMENT")
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
