"""Relative-position terms of attention scores: products of queries and keys with vectors of their distance.

The products of a rectangle with the vectors of all its distances are computed at once and read along its diagonals,
without indexing and without a matrix of vectors for pairs of positions.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import Function, once_differentiable


class Distances(NamedTuple):
    """The vectors of distances.

    Attributes:
        keys: (heads, 2 * m - 1, head_dim), multiplied by the query; row m - 1 + d is for a key d positions after it. m
            is at least the length of the longest sequence. None: no such product.
        queries: the same, multiplied by the key.
    """

    keys: Tensor | None
    queries: Tensor | None

    def of_heads(self, first: int, heads: int) -> "Distances":
        """The vectors of some of the heads."""
        return Distances(*(None if x is None else x.narrow(0, first, heads) for x in self))

    def rows(self) -> tuple[Tensor | None, Tensor | None]:
        """Both tables as (2 * m - 1, heads * head_dim), without a copy if the heads are adjacent in memory."""
        keys, queries = (None if x is None else x.transpose(0, 1).flatten(1) for x in self)
        return keys, queries

    def zeros(self) -> "Distances":
        """Zeros of the same shapes in fp32, in which gradients are summed."""
        return Distances(*(None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in self))

    def scores(self, q: Tensor, k: Tensor, first: int = 0) -> Tensor:
        """(n, heads, queries, keys), the sum of both products, not scaled.

        q: (n, heads, queries, head_dim), the first query at position `first`. k: (n, heads, keys, head_dim).
        """
        return _Scores.apply(q, k, *self, first)


NO_DISTANCES = Distances(None, None)


class _Scores(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, keys: Tensor | None, queries: Tensor | None, first: int) -> Tensor:
        ctx.first = first
        ctx.save_for_backward(q, k, keys, queries)
        scores = q.new_zeros(*q.shape[:3], k.shape[2])
        add_scores_(scores, q, k, Distances(keys, queries), first)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, *saved = ctx.saved_tensors
        tables = Distances(*saved)
        dtables = tables.zeros()
        of_inputs = gradients(grad, q, k, tables, dtables, ctx.first)
        return *of_inputs, *(None if x is None else x.to(q.dtype) for x in dtables), None


def add_scores_(scores: Tensor, q: Tensor, k: Tensor, tables: Distances, first: int = 0) -> None:
    """Add the result of `Distances.scores` to scores (n, heads, queries, keys)."""
    n, _, rows, columns = scores.shape
    if tables.keys is not None:
        reach, *_ = _reach(tables.keys, rows, columns, first)
        scores.add_(_diagonals(torch.bmm(_by_head(q), reach.transpose(1, 2)), n))
    if tables.queries is not None:
        # Transposed: a row belongs to a key, and its columns are the queries from the first to the last.
        reach, *_ = _reach(tables.queries, rows, columns, first)
        scores.add_(_diagonals(torch.bmm(_by_head(k), reach.flip(1).transpose(1, 2)), n).transpose(2, 3))


def gradients(
    dscores: Tensor, q: Tensor, k: Tensor, tables: Distances, dtables: Distances, first: int = 0
) -> tuple[Tensor | None, Tensor | None]:
    """The backward of `add_scores_` for the gradient dscores: returns the gradients of q and k (None: zero), and adds
    those of the tables to dtables."""
    rows, columns = dscores.shape[2:]
    dq: Tensor | None = None
    dk: Tensor | None = None
    if tables.keys is not None and dtables.keys is not None:
        reach, of_table, of_reach = _reach(tables.keys, rows, columns, first)
        slopes = _from_diagonals(dscores)
        dq = _by_sequence(torch.bmm(slopes, reach), q.shape)
        found = torch.bmm(slopes.transpose(1, 2), _by_head(q))
        dtables.keys[:, of_table].add_(found[:, of_reach])
    if tables.queries is not None and dtables.queries is not None:
        reach, of_table, of_reach = _reach(tables.queries, rows, columns, first)
        slopes = _from_diagonals(dscores.transpose(2, 3))
        dk = _by_sequence(torch.bmm(slopes, reach.flip(1)), k.shape)
        found = torch.bmm(slopes.transpose(1, 2), _by_head(k)).flip(1)
        dtables.queries[:, of_table].add_(found[:, of_reach])
    return dq, dk


def _by_head(x: Tensor) -> Tensor:
    """(n, heads, length, head_dim) -> (heads, n * length, head_dim)."""
    return x.transpose(0, 1).flatten(1, 2)


def _by_sequence(x: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_by_head`; shape: of the result."""
    n, heads, length, width = shape
    return x.view(heads, n, length, width).transpose(0, 1)


def _diagonals(x: Tensor, n: int) -> Tensor:
    """(heads, n * rows, rows + columns - 1), contiguous -> (n, heads, rows, columns), a view in which row i starts at
    its column rows - 1 - i."""
    heads, all_rows, wide = x.shape
    rows = all_rows // n
    strides = rows * wide, all_rows * wide, wide - 1, 1
    return x.as_strided((n, heads, rows, wide + 1 - rows), strides, x.storage_offset() + rows - 1)


def _from_diagonals(grad: Tensor) -> Tensor:
    """The gradient of the input of `_diagonals`, from that of its output."""
    n, heads, rows, columns = grad.shape
    x = grad.new_zeros(heads, n * rows, rows + columns - 1)
    _diagonals(x, n).copy_(grad)
    return x


def _reach(table: Tensor, rows: int, columns: int, first: int) -> tuple[Tensor, slice, slice]:
    """The rows of a table for a rectangle, (heads, rows + columns - 1, head_dim), from the distance between the last
    query and the first key on, with zeros at distances that only padding has; and the slices that the other rows have
    in the table and in the result."""
    low, wide = table.shape[1] // 2 + 1 - rows - first, rows + columns - 1
    before, after = max(0, -low), max(0, low + wide - table.shape[1])
    of_table, of_reach = slice(low + before, low + wide - after), slice(before, wide - after)
    part = table[:, of_table]
    return F.pad(part, (0, 0, before, after)) if before or after else part, of_table, of_reach
