"""Parameters that are single numbers, such as a gate or a temperature: every rank has them.

What has no dimensions FSDP cannot split. Such a parameter stays a plain tensor, equal on all ranks, and its gradient is
averaged at the end of each backward, as FSDP averages those of shards; in ``engine.accumulate`` once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from engine import runtime
from engine.optim.checks import mark_gradients_averaged
from engine.torch_compat import running_backward, when_backward_ends

_left_to_caller = False


@contextmanager
def left_to_caller() -> Iterator[None]:
    """No backward inside averages gradients of single numbers: the caller does."""
    global _left_to_caller
    before, _left_to_caller = _left_to_caller, True
    try:
        yield
    finally:
        _left_to_caller = before


class Scalars:
    """The single numbers of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.ndim == 0]
        self._backward = -1  # the last one that was told to average
        mark_gradients_averaged(self._parameters)

    def average_later(self) -> None:
        """Called in a backward: at its end the gradients are averaged, of all numbers that any rank has used."""
        if _left_to_caller or runtime.world_size() == 1 or not any(p.requires_grad for p in self._parameters):
            return
        if self._backward != (running := running_backward()):
            self._backward = running
            when_backward_ends(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        given = [p.grad for p in self._parameters]  # with what was there before, which is the same on all ranks
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, given, strict=True)]
        numbers = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
        used = torch.tensor([float(g is not None) for g in given], dtype=torch.float64, device=numbers[0].device)
        together = torch.cat([*(n.flatten().double() for n in numbers), used])
        dist.all_reduce(together)
        *sums, used = together.split([*(n.numel() for n in numbers), len(used)])
        for number, total in zip(numbers, sums, strict=True):
            number.copy_(total.view_as(number) / runtime.world_size())
        if any(g is None for g in given):  # else no GPU is waited for
            for parameter, gradient, ranks in zip(self._parameters, gradients, used.tolist(), strict=True):
                if ranks:
                    parameter.grad = gradient
