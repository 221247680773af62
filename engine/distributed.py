"""Differentiable collectives with BMTrain's gradients.

Each rank differentiates its own loss: ``all_gather`` returns the gradient of this rank's own slice, ``all_reduce``
passes on the gradient of this rank's own result. Backward sums nothing over ranks, except in ``broadcast`` and
``reduce_scatter``, whose inputs affect only the results of other ranks. (``torch.distributed.nn`` differentiates the
sum of all ranks' losses.)

``comm`` is a ProcessGroup; None means all ranks. One process counts as a group of one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from engine import runtime
from engine.tensors import as_bytes
from engine.torch_compat import all_gather_flat, reduce_scatter_flat

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and a division: not every backend has AVG
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


def all_gather(x: torch.Tensor, comm: dist.ProcessGroup | None = None) -> torch.Tensor:
    """x (...) of each rank, stacked: (ranks, ...). Shapes must be equal. Gradient: this rank's slice."""
    return _AllGather.apply(x, comm)


def all_reduce(x: torch.Tensor, op: str = "sum", comm: dist.ProcessGroup | None = None) -> torch.Tensor:
    """x of all ranks reduced by ``op``: "sum", "avg", "max", "min" or "prod"; a new tensor of the same shape.

    Gradient: of this rank's result with respect to this rank's x (max, min: where x is the result; prod: the product of
    the other ranks' values, also where they are zero).
    """
    return _AllReduce.apply(x, _known(op), comm)


def broadcast(src: torch.Tensor, root: int, comm: dist.ProcessGroup | None = None) -> torch.Tensor:
    """``src`` of rank ``root`` of the group, on every rank. Gradient: on the root the sum over all ranks, else 0."""
    size = _size(comm)
    if not 0 <= root < size:
        raise ValueError(f"root is {root}, expected a rank of the group: 0 to {size - 1}")
    return _Broadcast.apply(src, root, comm)


def reduce_scatter(x: torch.Tensor, op: str = "sum", comm: dist.ProcessGroup | None = None) -> torch.Tensor:
    """x (ranks * n, ...) of all ranks reduced by ``op``; rank r gets rows r * n to (r + 1) * n - 1: (n, ...).

    Gradient: of every rank's rows with respect to this rank's x.
    """
    size = _size(comm)
    if x.ndim == 0 or x.shape[0] % size:
        raise ValueError(f"reduce_scatter: dimension 0 of shape {tuple(x.shape)} must be a multiple of {size} ranks")
    if _known(op) in ("sum", "avg"):
        return _ReduceScatter.apply(x, op, comm)
    return _OwnRows.apply(all_reduce(x, op, comm), comm)


def _known(op: str) -> str:
    if op not in _OPS:
        raise ValueError(f"op is {op!r}, expected one of {', '.join(_OPS)}")
    return op


def _size(comm: dist.ProcessGroup | None) -> int:
    return runtime.world_size() if comm is None else dist.get_world_size(comm)


def _rank(comm: dist.ProcessGroup | None) -> int:
    return runtime.rank() if comm is None else dist.get_rank(comm)


def _reduced(x: torch.Tensor, op: str, comm: dist.ProcessGroup | None) -> torch.Tensor:
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if _size(comm) > 1:
        dist.all_reduce(out, op=_OPS[op], group=comm)
    return out / _size(comm) if op == "avg" else out


def _gathered(x: torch.Tensor, comm: dist.ProcessGroup | None) -> torch.Tensor:
    out = x.new_empty(_size(comm), *x.shape)
    if _size(comm) == 1:
        out[0] = x
    else:
        all_gather_flat(out, x, comm)
    return out


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.rank = _rank(comm)
        return _gathered(x, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[ctx.rank], None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str, comm: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.op, ctx.size = op, _size(comm)
        if op == "prod" and x.is_floating_point():
            # x = 0 on one rank: the gradient there is the product of the others, which 0 / 0 does not give.
            zero = x == 0
            zeros = _reduced(zero.to(torch.int32), "sum", comm)
            rest = _reduced(torch.where(zero, torch.ones_like(x), x), "prod", comm)
            slope = torch.where(zero, rest, rest / x) * (zeros == zero).to(x.dtype)
            ctx.save_for_backward(slope)
            return torch.where(zeros > 0, torch.zeros_like(rest), rest)
        out = _reduced(x, op, comm)
        if op in ("max", "min"):
            ctx.save_for_backward(x == out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.op == "avg":
            grad = grad / ctx.size
        elif ctx.op != "sum":
            grad = grad * ctx.saved_tensors[0]
        return grad, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, src: torch.Tensor, root: int, comm: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.root, ctx.comm = root, comm
        out = src.detach().clone(memory_format=torch.contiguous_format)
        if _size(comm) > 1:
            dist.broadcast(as_bytes(out), group_src=root, group=comm)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = _reduced(grad, "sum", ctx.comm)
        return total if _rank(ctx.comm) == ctx.root else torch.zeros_like(total), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str, comm: dist.ProcessGroup | None) -> torch.Tensor:
        size = _size(comm)
        ctx.divisor, ctx.comm = size if op == "avg" else 1, comm
        out = x.new_empty(x.shape[0] // size, *x.shape[1:])
        if size == 1:
            out.copy_(x)
        elif out.numel():
            reduce_scatter_flat(out.view(-1), x.detach().contiguous().view(-1), comm)
        return out / size if op == "avg" else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(grad, ctx.comm).flatten(0, 1) / ctx.divisor, None, None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.comm = comm
        return x.chunk(_size(comm))[_rank(comm)].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grad, ctx.comm).flatten(0, 1), None
