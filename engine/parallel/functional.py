"""Differentiable collectives of tensor, sequence and context parallelism, on plain local tensors.

Two conventions meet here. Over ``tp``, activations outside split layers are replicated and so are their gradients:
``copy_to`` and ``reduce_from`` are each other's adjoint. Over ``cp``, each rank's loss is the loss of the whole batch,
FSDP averages gradients over the ranks, and every collective has its true adjoint.
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
    """Sum in place. All ranks of the group have the same sizes, so nothing is sent for an empty tensor."""
    if x.numel():
        dist.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, group: Group) -> Tensor:
    """(n, ...) of each rank -> (ranks * n, ...)."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    if x.numel():
        all_gather_flat(out.view(-1), x.contiguous().view(-1), group)
    return out


def _scatter_sum(x: Tensor, group: Group) -> Tensor:
    """(ranks * n, ...) of each rank -> the sum of this rank's (n, ...)."""
    x = x.contiguous()
    parts = torch.empty_like(x)
    if x.numel():
        dist.all_to_all_single(parts, x, group=group)  # and add: faster on gloo than its reduce-scatter
    return parts.view(group.size(), -1, *x.shape[1:]).sum(0)


def _own_rows(x: Tensor, group: Group) -> Tensor:
    rows = x.shape[0] // group.size()
    return x.narrow(0, group.rank() * rows, rows).contiguous()


def _fresh(grad: Tensor) -> Tensor:
    """A copy of a gradient that a collective may overwrite: others may hold the same tensor."""
    return grad.clone(memory_format=torch.contiguous_format)


def _function(name: str, forward: Callable[..., Tensor], backward: Callable[..., Tensor], doc: str) -> Any:
    """An autograd function of (x, group), linear in x, from itself and its adjoint."""

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


# Over tp. No collective works in the memory of x: recomputation may have kept it (a matrix product's output).
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


def _exchange(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        dist.all_to_all_single(out, x, group=group)
    return out


exchange = _function("exchange", _exchange, _exchange, "x (ranks, ...): part i goes to rank i; parts by their sender.")


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
    """(..., this rank's columns, as torch.chunk deals them) -> (..., columns), for what all ranks compute alike."""
    return _JoinColumns.apply(x, group, columns)


class Once:
    """Applies a collective once to each tensor that several layers take, such as the input of q, k and v (with low-rank
    updates between them, whose inputs are others).

    References are strong, up to ``forget``: when a tensor dies is not the same on all ranks (a collective may hold it a
    little longer), and they must all make the same collectives.
    """

    _MOST = 8  # inputs that are held at once; a plan where no layer ends what "colwise" begins never forgets

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, tuple[int, bool], Tensor]] = []

    def __call__(self, function: Callable[[Tensor, Group], Tensor], x: Tensor, group: Group) -> Tensor:
        # A tensor of inference mode does not count its changes: no layer changes its input.
        key = (0 if x.is_inference() else x._version, torch.is_grad_enabled())
        for given, its_key, out in self._made:
            if given is x and its_key == key:
                return out
        out = function(x, group)
        self._made.append((x, key, out))
        del self._made[: -self._MOST]
        return out

    def forget(self) -> None:
        """Let go of the tensors: no layer will take these inputs again."""
        self._made.clear()


class Streams:
    """Random numbers for activations of which each rank holds a part: a stream of its own for each rank.

    Elsewhere the ranks of a model-parallel group draw alike. A stream starts from a number of the common one, so a
    recomputed block repeats it.
    """

    def __init__(self) -> None:
        self._outer: list[tuple[str, Tensor, Tensor | None]] = []

    def depth(self) -> int:
        return len(self._outer)

    def enter(self, kind: str, index: int) -> None:
        """Start the stream of rank ``index``; nothing if one of this kind is the innermost already."""
        if self._outer and self._outer[-1][0] == kind:
            return
        common = int(torch.randint(2**48, ()))
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._outer.append((kind, torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None))
        seed = (common + (index + 1) * 0x9E3779B97F4A7C15) % 2**63
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)

    def leave(self, kind: str) -> None:
        """Go on with the stream around; nothing if the innermost is of another kind."""
        if self._outer and self._outer[-1][0] == kind:
            self.unwind(len(self._outer) - 1)

    def forget(self) -> None:
        """Drop streams that nothing will leave, as a recomputation leaves them that stopped early."""
        self._outer.clear()

    def unwind(self, depth: int) -> None:
        """Leave all streams but the outermost ``depth``."""
        while len(self._outer) > depth:
            _, cpu, gpu = self._outer.pop()
            torch.set_rng_state(cpu)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu)


streams = Streams()
