"""Activation checkpointing: the forward's routing is kept, or found to be the same, or refused."""

import mok
import pytest
import torch
from problems import same_bits
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.RMSNorm(16)
        self.moe = mok.MoELayer(16, 8, 8, 2, shared_intermediate=6, **settings)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def gradients(block, x, run):
    block.zero_grad()
    x = x.clone().requires_grad_()
    run(block, x).square().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())]


WAYS = {
    "reentrant": lambda b, x: checkpoint(b, x, use_reentrant=True),
    "plain": lambda b, x: checkpoint(b, x, use_reentrant=False),
    "routing": lambda b, x: checkpoint(
        b, x, use_reentrant=False, context_fn=mok.checkpoint_policy()
    ),
    "layer": lambda b, x: checkpoint(
        b, x, use_reentrant=False, context_fn=mok.checkpoint_policy("layer")
    ),
}


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.calls[name] = self.calls.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", WAYS)
def test_same_bits_as_without(way):
    block, x = Block(), torch.randn(11, 16)
    want = gradients(block, x, lambda b, x: b(x))
    for got, expected in zip(gradients(block, x, WAYS[way]), want, strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize(
    ("way", "selections", "forwards"), [("plain", 2, 2), ("routing", 1, 2), ("layer", 1, 1)]
)
def test_what_is_computed_again(way, selections, forwards):
    block, x = Block(), torch.randn(11, 16)
    with Count() as count:
        gradients(block, x, WAYS[way])
    assert count.calls["mok.select_experts.default"] == selections
    assert count.calls["mok.forward_eager.default"] == forwards
    assert count.calls["mok.backward_eager.default"] == 1


@pytest.mark.parametrize("way", ["plain", "routing", "layer"])
def test_P1_all_equal_logits(way):
    block, x = Block(), torch.randn(11, 16)
    with torch.no_grad():
        block.moe.router_weight.zero_()
    want = gradients(block, x, lambda b, x: b(x))
    for got, expected in zip(gradients(block, x, WAYS[way]), want, strict=True):
        assert same_bits(got, expected)


def test_P1_routing_that_changes_is_refused_or_kept():
    """The router's bias is moved between forward and backward, as a balancing step might do."""
    block = Block(router=mok.RouterConfig("sigmoid", bias=True))
    x = torch.randn(11, 16)
    want = gradients(block, x, lambda b, x: b(x))

    def moved(way):
        def run(b, x):
            y = WAYS[way](b, x)
            b.moe.router_bias.data += torch.arange(8.0)  # other experts from now on
            return y

        return run

    for way in ("routing", "layer"):
        block.moe.router_bias.zero_()
        for got, expected in zip(gradients(block, x, moved(way)), want, strict=True):
            assert same_bits(got, expected)
    block.moe.router_bias.zero_()
    with pytest.raises(ValueError, match=r"topk_ids: not those of the forward.*checkpoint_policy"):
        gradients(block, x, moved("plain"))
    block.moe.router_bias.zero_()
    gradients(block, x, WAYS["plain"])  # the next good call works


def test_P1_ids_changed_by_the_caller():
    layer = mok.MoELayer(16, 8, 8, 2, router=None)
    x = torch.randn(5, 16, requires_grad=True)
    weights = torch.rand(5, 2)
    calls = []

    def function(x):
        ids = torch.randint(0, 8, (5, 2), generator=torch.Generator().manual_seed(len(calls)))
        calls.append(ids)
        return layer(x, topk_ids=ids, topk_weights=weights)

    y = checkpoint(function, x, use_reentrant=False)
    with pytest.raises(ValueError, match="topk_ids: not those of the forward"):
        y.sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("way", ["plain", "routing"])
def test_compiled_and_checkpointed(way):
    torch._dynamo.reset()
    block, x = Block(), torch.randn(11, 16)
    want = gradients(block, x, lambda b, x: b(x))
    compiled = torch.compile(WAYS[way], fullgraph=True, backend="aot_eager")
    for got, expected in zip(gradients(block, x, compiled), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_policy_name():
    with pytest.raises(ValueError, match="keep: 'all'"):
        mok.checkpoint_policy("all")
