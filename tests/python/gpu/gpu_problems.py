"""Problems on a GPU: bf16, sizes that are multiples of 64."""

from dataclasses import fields

import torch
from problems import Problem, problem

from reference import Weights

DEVICE = torch.device("cuda", 0)


def gpu_problem(seed, device=DEVICE, **settings):
    settings = {"tokens": 37, "hidden": 128, "inner": 64, "experts": 8, "topk": 3, **settings}
    return moved(problem(seed, dtype=torch.bfloat16, **settings), device)


def overwrite(static, tensors, source):
    """What a captured call reads, with another problem's: `tensors` are `leaves(static)`."""
    static.ids.copy_(source.ids)
    static.d_y.copy_(source.d_y)
    for t, s in zip(tensors, (source.x, source.topk_weights, *source.weights.each()), strict=True):
        if t is not None:
            t.data.copy_(s)


def moved(thing, device):
    """A problem, a result of `run`, or any tuple or list of tensors, on another device."""
    if torch.is_tensor(thing):
        return thing.detach().to(device)
    if isinstance(thing, tuple | list):
        return type(thing)(moved(each, device) for each in thing)
    if isinstance(thing, Weights | Problem):
        return type(thing)(*(moved(getattr(thing, f.name), device) for f in fields(thing)))
    return thing
