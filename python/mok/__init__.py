"""Mixture-of-experts layers with expert parallelism.

    import mok
    mok.init(max_tokens=4096)              # the EP group: all ranks of torchrun, or this process
    layer = mok.MoELayer(hidden=512, intermediate=256, experts=16, topk=2, dtype=torch.bfloat16)
    y = layer(x)                           # x [..., 512] bf16, on every rank

See docs/python.md.
"""

from mok import functional, integrations, ops
from mok._library import library_version
from mok.autograd import moe
from mok.checkpoint import checkpoint_policy
from mok.group import (
    Group,
    Options,
    default_group,
    init,
    local_group,
    new_group,
    reserve,
    synchronize,
)
from mok.layer import MoELayer, Routing
from mok.losses import load_balancing_loss, router_z_loss
from mok.precision import QuantizedWeights, RoundedWeights, quantize_weights
from mok.router import RouterConfig, expert_counts, route

__version__ = library_version()

__all__ = [
    "Group",
    "MoELayer",
    "Options",
    "QuantizedWeights",
    "RoundedWeights",
    "RouterConfig",
    "Routing",
    "checkpoint_policy",
    "default_group",
    "expert_counts",
    "functional",
    "init",
    "integrations",
    "load_balancing_loss",
    "local_group",
    "moe",
    "new_group",
    "ops",
    "quantize_weights",
    "reserve",
    "route",
    "router_z_loss",
    "synchronize",
]
