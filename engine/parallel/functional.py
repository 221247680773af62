"""Differentiable collectives for tensor, sequence and context parallelism, on plain local tensors.

They follow two conventions. Over ``tp``, activations outside of split layers are replicated, and so are their
gradients: ``copy_to`` and ``reduce_from`` are each other's adjoint. Over ``cp``, each rank's loss is the loss of the
whole batch, FSDP averages gradients over the ranks, and every collective has its true adjoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.torch_compat import all_gather_flat

Group = dist.ProcessGroup


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum in place. Sizes are equal on all ranks of the group, so nothing is sent for an empty tensor."""
    if x.numel():
        dist.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, group: Group) -> Tensor:
    """(n, ...) of each rank -> (ranks * n, ...)."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    all_gather_flat(out, x, group)
    return out


def _scatter_sum(x: Tensor, group: Group) -> Tensor:
    """(ranks * n, ...) of each rank -> the sum of this rank's (n, ...)."""
    x = x.contiguous()
    parts = torch.empty_like(x)
    if x.numel():
        dist.all_to_all_single(parts, x, group=group)  # with the sum below, faster than gloo's reduce-scatter
    return parts.view(group.size(), -1, *x.shape[1:]).sum(0)


def _own_rows(x: Tensor, group: Group) -> Tensor:
    rows = x.shape[0] // group.size()
    return x.narrow(0, group.rank() * rows, rows).contiguous()


def _fresh(grad: Tensor) -> Tensor:
    """A copy that a collective may overwrite, because others may hold the same tensor."""
    return grad.clone(memory_format=torch.contiguous_format)


def _function(name: str, forward: Callable[..., Tensor], backward: Callable[..., Tensor], doc: str) -> Any:
    """An autograd function of (x, group) that is linear in x, made from its forward and its adjoint."""

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return backward(grad, ctx.group), None

    Collective.__name__ = Collective.__qualname__ = name

    def apply(x: Tensor, group: Group) -> Tensor:
        return Collective.apply(x, group)

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = doc
    return apply


# Over tp. No collective overwrites x, which recomputation may have kept (as the output of a matrix product).
copy_to = _function("copy_to", lambda x, g: x.view_as(x), lambda x, g: _all_reduce(_fresh(x), g), "x; sums gradients.")
reduce_from = _function(
    "reduce_from", lambda x, g: _all_reduce(_fresh(x.detach()), g), lambda x, g: x, "The sum of each rank's x."
)
split_rows = _function("split_rows", _own_rows, _gather, "This rank's rows of x, which all ranks have.")
join_rows = _function("join_rows", _gather, _own_rows, "All rows, for a part of the model that all ranks compute.")
# With their true adjoints.
sum_over = _function(
    "sum_over", lambda x, g: _all_reduce(_fresh(x), g), lambda x, g: _all_reduce(_fresh(x), g), "The sum of each x."
)
gather_rows = _function("gather_rows", _gather, _scatter_sum, "All rows, of which each rank uses some.")
scatter_sum_rows = _function("scatter_sum_rows", _scatter_sum, _gather, "This rank's rows of the sum of each x.")


def _all_to_all(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        dist.all_to_all_single(out, x, group=group)
    return out


all_to_all = _function(
    "all_to_all", _all_to_all, _all_to_all, "x (ranks, ...): part i goes to rank i; parts by their sender."
)


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, columns: int) -> Tensor:
        widest = -(-columns // group.size())
        start = min(group.rank() * widest, columns)
        ctx.own = start, x.shape[-1]
        rows = x.new_zeros(widest, math.prod(x.shape[:-1]))
        rows[: x.shape[-1]] = x.reshape(rows.shape[1], x.shape[-1]).t()
        return _gather(rows, group)[:columns].t().reshape(*x.shape[:-1], columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, *ctx.own).contiguous(), None, None


def join_columns(x: Tensor, group: Group, columns: int) -> Tensor:
    """(..., this rank's columns, as torch.chunk splits them) -> (..., columns), for layers that all ranks repeat."""
    return _JoinColumns.apply(x, group, columns)
