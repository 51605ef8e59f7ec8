"""Auxiliary losses of routers."""

import torch
from torch import Tensor


def load_balancing_loss(probabilities: Tensor, counts: Tensor, token_mask: Tensor | None = None):
    """E * sum_e f_e P_e (Switch Transformer, arXiv:2101.03961, equation 4); 1 when balanced.

    Args:
        probabilities: [..., E], the scores of the layer's ``Routing``; rows are scaled to sum 1.
        counts: int64 [E], slots per expert, of the same tokens (or of more ranks: pass the sum).
        token_mask: bool [...]; tokens that are False are left out.

    Returns: a scalar, differentiable with respect to probabilities.
    """
    experts = probabilities.shape[-1]
    rows = probabilities.reshape(-1, experts)
    if token_mask is not None:
        keep = token_mask.reshape(-1, 1)
        # Not rows * keep: a masked token may hold NaN.
        rows = torch.where(keep, rows, 1.0)
        tokens = keep.sum().clamp_min(1)
    else:
        keep, tokens = None, max(rows.shape[0], 1)
    share = rows / rows.sum(dim=-1, keepdim=True)
    if keep is not None:
        share = torch.where(keep, share, 0.0)
    fraction = counts.to(share.dtype) / counts.sum().clamp_min(1)
    return experts * (fraction * share.sum(dim=0) / tokens).sum()


def router_z_loss(logits: Tensor, token_mask: Tensor | None = None):
    """Mean of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, equation 5); a scalar.

    Args:
        logits: [..., E].
        token_mask: bool [...]; tokens that are False are left out.
    """
    rows = logits.reshape(-1, logits.shape[-1]).float()
    if token_mask is None:
        return rows.logsumexp(dim=-1).square().sum() / max(rows.shape[0], 1)
    keep = token_mask.reshape(-1, 1)
    z = torch.where(keep, rows, 0.0).logsumexp(dim=-1).square()
    return torch.where(keep.squeeze(-1), z, 0.0).sum() / keep.sum().clamp_min(1)
