"""Activation checkpointing: what of a layer is kept.

Plain ``torch.utils.checkpoint`` works: routing and layer are computed again in backward, and on the
CPU a hash of the forward's routing is compared; ValueError if it came out differently. With the
policy below the choice of experts is kept, so that it cannot.
"""

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def _keeps_routing(context, operator, *args, **kwargs) -> CheckpointPolicy:
    if operator is torch.ops.mok.select_experts.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keeps_layer(context, operator, *args, **kwargs) -> CheckpointPolicy:
    mok = torch.ops.mok
    if operator in (mok.select_experts.default, mok.forward.default, mok.forward_eager.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_policy(keep: str = "routing"):
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    Args:
        keep: "routing": the chosen ids are kept (8 bytes a slot), all else is computed again;
            "layer": also the layer's output and what its backward needs, so it runs only once.

    Raises ValueError for another `keep`.
    """
    policies = {"routing": _keeps_routing, "layer": _keeps_layer}
    if keep not in policies:
        raise ValueError(f"keep: {keep!r} is none of {', '.join(policies)}")
    return functools.partial(create_selective_checkpoint_contexts, policies[keep])
