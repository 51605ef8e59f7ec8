"""One tensor out of parameters, one an expert, without a copy where they lie in a row."""

import torch
from torch import Tensor, nn


def _in_a_row(tensors) -> Tensor | None:
    """The tensors as one view [E, ...], if they stand in one storage at equal distances."""
    first = tensors[0]
    if any(
        t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        or (t.shape, t.dtype, t.stride()) != (first.shape, first.dtype, first.stride())
        or not t.is_contiguous()
        for t in tensors
    ):
        return None
    step = tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else 0
    step = step or first.numel()
    for i, t in enumerate(tensors):
        if t.storage_offset() != first.storage_offset() + i * step:
            return None
    if step < first.numel():
        return None
    whole = torch.empty(0, dtype=first.dtype, device=first.device)
    return whole.set_(
        first.untyped_storage(), first.storage_offset(), (len(tensors), *first.shape),
        (step, *first.stride()),
    )  # fmt: skip


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, main_grads, *parameters):
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters if main_grads else None
        whole = _in_a_row(parameters)
        return torch.stack(parameters) if whole is None else whole

    @staticmethod
    def backward(ctx, grad):
        if grad is not None:
            return None, *grad.unbind(0)
        if ctx.parameters is None:
            return (None,) * len(ctx.needs_input_grad)
        # The sum is in main_grad already. Megatron's hook wants to see some gradient, and is told
        # by the flag not to add it.
        for parameter in ctx.parameters:
            parameter.grad_added_to_main_grad = True
        return None, *(parameter.detach() for parameter in ctx.parameters)


def stacked(parameters, accumulate: bool = False) -> Tensor:
    """[E, ...] of E parameters of one shape; differentiable.

    A view where they stand in one storage at equal distances (see :func:`adopt`), else a copy.

    Args:
        accumulate: give the result a ``main_grad`` made of theirs, if those stand in a row too.
    """
    parameters = tuple(parameters)
    main_grad = None
    if accumulate and all(getattr(p, "main_grad", None) is not None for p in parameters):
        main_grad = _in_a_row([p.main_grad for p in parameters])
        if main_grad is not None and main_grad.dtype != torch.float32:
            main_grad = None
    whole = _Stack.apply(main_grad is not None, *parameters)
    if main_grad is not None and whole.requires_grad:
        whole.main_grad = main_grad
    return whole


@torch.no_grad()
def adopt(parameters: list[nn.Parameter]) -> None:
    """Moves parameters of one shape into one storage, so that :func:`stacked` need not copy."""
    if _in_a_row(parameters) is None:
        for parameter, place in zip(parameters, torch.stack(parameters), strict=True):
            parameter.data = place
