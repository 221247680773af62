"""Parameters without dimensions, such as a gate or a temperature, of which every rank has a copy.

FSDP cannot shard them. Such a parameter stays a plain tensor, equal on all ranks, and its gradient is averaged at the
end of each backward, as FSDP does for shards, or by ``engine.accumulate`` once a step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from engine import runtime
from engine.optim.checks import mark_gradients_averaged
from engine.torch_compat import run_after_backward, running_backward

_left_to_caller: frozenset[torch.Tensor] = frozenset()


@contextmanager
def left_to_caller(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, backward does not average the gradients of those without dimensions among these: the caller does."""
    global _left_to_caller
    before, _left_to_caller = _left_to_caller, _left_to_caller.union(p for p in parameters if p.ndim == 0)
    try:
        yield
    finally:
        _left_to_caller = before


class Scalars:
    """The parameters of a model that have no dimensions."""

    def __init__(self, model: nn.Module) -> None:
        # Their places instead of the parameters, which load_state_dict(assign=True) replaces.
        self._places = [
            (weakref.ref(module), name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.ndim == 0
        ]
        self._backward = -1  # the last backward that was told to average

    def average_later(self) -> None:
        """Called in a backward: average, at its end, the gradients of all those that any rank has used."""
        if not self._places or runtime.world_size() == 1 or self._backward == (running := running_backward()):
            return
        self._backward = running
        numbers = [p for p in self._parameters() if p.requires_grad and p not in _left_to_caller]
        if numbers:
            mark_gradients_averaged(numbers)
            run_after_backward(functools.partial(_average, numbers))

    def _parameters(self) -> list[nn.Parameter]:
        """The parameters that the model has now, each once."""
        there = [(module, name) for place, name in self._places if (module := place()) is not None]
        return [p for p in dict.fromkeys(module._parameters.get(name) for module, name in there) if p is not None]


@torch.no_grad()
def _average(parameters: list[nn.Parameter]) -> None:
    """Average the gradients of all parameters that any rank has used."""
    given = [p.grad for p in parameters]  # including earlier gradients, which are equal on all ranks
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, given, strict=True)]
    numbers = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    used = torch.tensor([float(g is not None) for g in given], dtype=torch.float64, device=numbers[0].device)
    together = torch.cat([*(n.flatten().double() for n in numbers), used])
    dist.all_reduce(together)
    *sums, used = together.split([*(n.numel() for n in numbers), len(used)])
    for number, total in zip(numbers, sums, strict=True):
        number.copy_(total.view_as(number) / runtime.world_size())
    if any(g is None for g in given):  # otherwise the host need not wait for the GPU
        for parameter, gradient, ranks in zip(parameters, gradients, used.tolist(), strict=True):
            if ranks:
                parameter.grad = gradient
