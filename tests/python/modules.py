"""Checks of modules with a MoELayer in them that hold on every device."""

import torch
import torch.distributed as dist
from problems import same_bits


def check_fully_sharded(make, x, compile_it):
    """make(): a net with .inner and .moe. Two ranks, each with its x."""
    from torch.distributed.fsdp import fully_shard

    net, plain = make(), make()
    # Experts are this rank's own: FSDP must leave them alone.
    fully_shard(net, ignored_params=set(net.moe.expert_parameters()))
    function = torch.compile(net, backend="aot_eager") if compile_it else net
    y, want = function(x), plain(x)
    y.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(net.moe.w_gate.grad, plain.moe.w_gate.grad)
    gradient = net.inner.weight.grad.full_tensor()
    dist.all_reduce(plain.inner.weight.grad)
    torch.testing.assert_close(gradient, plain.inner.weight.grad / 2)
    return True


def leave_experts_to_their_ranks(net):
    """For DistributedDataParallel around `net`."""
    from torch.nn.parallel import DistributedDataParallel

    names = [
        n for n, p in net.named_parameters() if any(p is e for e in net.moe.expert_parameters())
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)


def check_noticed_changes(make, x):
    """make(): a MoELayer in a quantised precision, the same each time. Returns a changed one."""
    layer = make()
    first = layer(x)
    kept = layer._quantized[1]
    assert same_bits(layer(x), first) and layer._quantized[1] is kept
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(x).float().square().mean().backward()
    optimizer.step()
    second = layer(x)
    assert layer._quantized[1] is not kept and not same_bits(second, first)
    fresh = make()
    fresh.load_state_dict(layer.state_dict())
    assert same_bits(fresh(x), second)
    layer.w_down.data.mul_(2)  # the version counter does not see this
    assert same_bits(layer(x), second)
    layer.requantize()
    assert not same_bits(layer(x), second)
    return layer
