"""Products of groups of rows, each with a matrix of its own: the layers of a mixture of experts.

On a CPU each group is one product, written to its place in the result, and so are the gradients: with autograd's
functions, the gradient of one group's matrix is a tensor of all of them. The compiled operator multiplies all groups at
once (csrc/cpu/bind_products.h), so that a group of a few rows, as in generation, takes no time but to read its matrix;
on Intel's CPUs, and without the operator, they are products of `engine.ops.gemm`. A GPU multiplies all groups by
one kernel of torch if the numbers are bf16, without waiting for their sizes; for others it waits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library, remade
from engine.ops.autocast import as_factors
from engine.ops.autograd import Function, once_differentiable
from engine.ops.compilation import eager
from engine.ops.gemm import as_it_lies, compiled, few_compiled, matmul, matmul_nt, onednn_linear
from engine.torch_compat import may_round_products

_ALIGNED = 8  # elements of 16 bits: rows of the kernel's matrices begin at multiples of 16 bytes


def _bounds(ends: Tensor) -> list[tuple[int, slice]]:
    """(group, its rows) of the groups that have any."""
    last, found = 0, []
    for group, end in enumerate(ends.tolist()):
        if end > last:
            found.append((group, slice(last, end)))
        last = end
    return found


def _compiled(*tensors: Tensor) -> bool:
    """Whether the compiled operator multiplies these: where it is at least as fast as torch. It starts the threads once
    for all groups."""
    return library.plain_fp32(*tensors) and ((onednn_linear()[0] and compiled()) or few_compiled())


def _multiply(out: Tensor, a: Tensor, b: Tensor, ends: Tensor, add: bool = False) -> None:
    """The compiled operator, which takes matrices whose rows or columns are contiguous."""
    a, b = as_it_lies(a), as_it_lies(b)
    torch.ops.modelcenter.grouped_product_(out, a, b, ends, add, may_round_products())


def _into(room: Tensor, product: Tensor) -> None:
    """Write a product to `room` unless it is there."""
    if product is not room:
        room.copy_(product)


def _products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (n, in) times each group's matrix of weight (groups, out, in), transposed: (n, out)."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    if _compiled(x, weight):
        _multiply(out, x, weight.contiguous().transpose(1, 2), ends)
        return out
    for group, rows in _bounds(ends):
        room = out[rows]
        _into(room, matmul_nt(x[rows], weight[group], room=room))
    return out


def _row_gradients(grad: Tensor, weight: Tensor, ends: Tensor, dx: Tensor | None) -> Tensor:
    """grad (n, out) times each group's matrix of weight (groups, out, in): (n, in), added to dx if it is given."""
    out = grad.new_empty(grad.shape[0], weight.shape[2]) if dx is None else dx
    if _compiled(grad, weight, out):
        _multiply(out, grad, weight.contiguous(), ends, add=dx is not None)
        return out
    for group, rows in _bounds(ends):
        room = out[rows]
        _into(room, matmul(grad[rows], weight[group], None if dx is None else room, room))
    return out


def _matrix_gradients(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad (n, out), transposed, times x (n, in) for each group of rows: (groups, out, in)."""
    out = grad.new_empty(len(ends), grad.shape[1], x.shape[1])
    if _compiled(grad, x):
        _multiply(out, as_it_lies(grad).t(), x, ends)
        return out
    empty = set(range(len(out)))
    for group, rows in _bounds(ends):
        room = out[group]
        _into(room, matmul(grad[rows].t(), x[rows], room=room))
        empty.discard(group)
    for group in empty:
        out[group].zero_()
    return out


class _GroupedLinears(Function):
    """Layers of the same rows: the products accumulate the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        need_x, _, *needed = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.ends = ends
        remade.keep(ctx, x if any(needed) else None, *(w if need_x else None for w in weights))
        return tuple(_products(x, weight, ends) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = remade.kept(ctx)
        _, _, *needed = ctx.needs_input_grad
        dx: Tensor | None = None
        found: list[Tensor | None] = []
        for grad, weight, need_weight in zip(grads, weights, needed, strict=True):
            if grad is not None and weight is not None:
                dx = _row_gradients(grad, weight, ctx.ends, dx)
            found.append(None if grad is None or not need_weight else _matrix_gradients(grad, x, ctx.ends))
        return dx, None, *found


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
