"""Products of groups of rows, each with a matrix of its own: the layers of a mixture of experts.

On a CPU each group is one product of `engine.ops.gemm`, written to its place in the result, and so are the gradients:
with autograd's functions, the gradient of one group's matrix is a tensor of all of them. A GPU multiplies all groups by
one kernel of torch if the numbers are bf16, without waiting for their sizes; for others it waits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import remade
from engine.ops.autocast import as_factors
from engine.ops.autograd import Function, once_differentiable
from engine.ops.compilation import eager
from engine.ops.gemm import matmul, matmul_nt

_ALIGNED = 8  # elements of 16 bits: rows of the kernel's matrices begin at multiples of 16 bytes


def _bounds(ends: Tensor) -> list[tuple[int, slice]]:
    """(group, its rows) of the groups that have any."""
    last, found = 0, []
    for group, end in enumerate(ends.tolist()):
        if end > last:
            found.append((group, slice(last, end)))
        last = end
    return found


def _into(room: Tensor, product: Tensor) -> None:
    """Write a product to `room` unless it is there."""
    if product is not room:
        room.copy_(product)


class _GroupedLinears(Function):
    """Layers of the same rows: the products accumulate the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        need_x, _, *needed = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.bounds, ctx.shapes = _bounds(ends), [w.shape for w in weights]
        remade.keep(ctx, x if any(needed) else None, *(w if need_x else None for w in weights))
        outs = tuple(x.new_empty(x.shape[0], w.shape[1]) for w in weights)
        for group, rows in ctx.bounds:
            for out, w in zip(outs, weights, strict=True):
                room = out[rows]
                _into(room, matmul_nt(x[rows], w[group], room=room))
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = remade.kept(ctx)
        _, _, *needed = ctx.needs_input_grad
        dx: Tensor | None = None
        found: list[Tensor | None] = []
        for grad, weight, need_weight, shape in zip(grads, weights, needed, ctx.shapes, strict=True):
            if grad is None:
                found.append(None)
                continue
            if weight is not None:
                first, dx = dx is None, grad.new_empty(grad.shape[0], shape[2]) if dx is None else dx
                for group, rows in ctx.bounds:
                    add_to = None if first else dx[rows]
                    _into(dx[rows], matmul(grad[rows], weight[group], add_to, room=dx[rows]))
            dweight = None
            if need_weight:
                dweight = grad.new_empty(shape)
                for group, rows in ctx.bounds:
                    _into(dweight[group], matmul(grad[rows].t(), x[rows], room=dweight[group]))
                _zero_others(dweight, [group for group, _ in ctx.bounds])
            found.append(dweight)
        return dx, None, *found


def _zero_others(x: Tensor, groups: list[int]) -> None:
    """Zero the matrices of groups that are not among these."""
    if len(groups) < len(x):
        for group in {*range(len(x))}.difference(groups):
            x[group].zero_()


def _in_one_kernel(x: Tensor, *weights: Tensor) -> bool:
    """Whether torch multiplies these by one kernel that does not wait for the sizes of the groups."""
    if x.device.type != "cuda" or any(t.dtype != torch.bfloat16 for t in (x, *weights)):
        return False
    aligned = all(size % _ALIGNED == 0 for w in weights for size in w.shape[1:])
    return aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


@eager
def grouped_linears(x: Tensor, ends: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Linear layers of the same rows, which are sorted by group: each row times the matrix of its group.

    Args:
        x: (n, in). ends: (groups,) int32, the number of rows of each group and those before it; the last is n. weights:
            (groups, out, in) each; the sizes `out` may differ.

    Returns:
        (n, out) for each of the weights.
    """
    x, *weights = as_factors(x, *weights)  # type: ignore[assignment]
    if _in_one_kernel(x, *weights):
        return tuple(F.grouped_mm(x, w.transpose(1, 2), offs=ends) for w in weights)
    found: tuple[Tensor, ...] = _GroupedLinears.apply(x, ends, *weights)
    return found
