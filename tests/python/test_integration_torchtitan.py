"""torchtitan's MoE layer with the override that lets mok compute its experts."""

import copy
import importlib.util

import pytest
import ranks
import torch

needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)
pytestmark = needs_torchtitan
TARGET = "mok.integrations.torchtitan.routed_experts"


def close(a, b):
    a, b = a.detach().double(), b.detach().double()
    return (a - b).norm() <= 3e-2 * b.norm()


def config_of():
    """A tree with a MoE layer of torchtitan in it, tiny."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import (
        GroupedExperts,
        MoE,
        RoutedExperts,
        TokenChoiceTopKRouter,
    )
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    return MoE.Config(
        num_experts=6,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=64, hidden_dim=64, num_experts=6),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=6, top_k=2),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=6, top_k=2, gate=Linear.Config(in_features=64, out_features=6, bias=False)
        ),
        load_balance_coeff=None,
    )


def layers(**kwargs):
    """(torchtitan's, ours), of the same parameters."""
    from torchtitan.config import OverrideConfig, apply_overrides

    config = config_of()
    lines = apply_overrides(OverrideConfig(imports=[(TARGET, kwargs)]), config)
    assert len(lines) == 1 and TARGET in lines[0]
    ours, theirs = config.build(), config_of().build()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_layer_computes_the_same(dtype):
    compare_layers(dtype, "cpu")


def compare_layers(dtype, device):
    theirs, ours = (layer.to(device, dtype) for layer in layers())
    x = torch.randn(2, 9, 64).to(device, dtype)
    results = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        assert y.dtype == dtype and y.shape == x.shape
        y.float().square().sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"y": y, "x": leaf.grad, **grads})
        assert layer.tokens_per_expert_E.sum() == 36
    for name, want in results[0].items():
        assert close(results[1][name], want), name


def test_other_experts_are_refused():
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import GroupedExperts

    config = config_of()

    class Other(GroupedExperts):
        from dataclasses import dataclass

        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    inner = config.routed_experts.inner_experts
    config.routed_experts.inner_experts = Other.Config(
        dim=inner.dim, hidden_dim=inner.hidden_dim, num_experts=inner.num_experts
    )
    with pytest.raises(ValueError, match="inner_experts: mok computes GroupedExperts"):
        apply_overrides(OverrideConfig(imports=[TARGET]), config)


def _on_ranks(rank):
    """Two expert-parallel ranks; the experts' parameters are sharded as torchtitan's are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(5)
    theirs, ours = (layer.bfloat16() for layer in layers(max_tokens=16))
    x = torch.randn(2, 8, 64).bfloat16()
    want = theirs(x)[rank : rank + 1]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))

    class Dims:  # what the layer asks torchtitan's ParallelDims for
        @staticmethod
        def get_optional_mesh(_):
            return mesh

    experts = ours.routed_experts.inner_experts
    for name, parameter in list(experts.named_parameters()):
        shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(experts, name, torch.nn.Parameter(shard))
    ours.routed_experts.parallelize(Dims())
    got = ours(x[rank : rank + 1])
    got.float().sum().backward()
    assert experts.w1_EFD.grad.to_local().shape == (3, 64, 64)
    return want, got


def test_two_expert_parallel_ranks():
    for want, got in ranks.run(2, _on_ranks, timeout=200):
        assert close(got, want)


def test_expert_parallelism_needs_max_tokens():
    _, ours = layers()

    class Dims:
        @staticmethod
        def get_optional_mesh(_):
            return copy  # not None

    with pytest.raises(ValueError, match=r"^max_tokens: needed"):
        ours.routed_experts.parallelize(Dims())
