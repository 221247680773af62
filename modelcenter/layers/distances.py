"""What the distance between a query and a key adds to their score, as products with either."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import Function, once_differentiable


class _Diagonals(Function):
    """x (n, heads, rows, rows + columns - 1) -> (n, heads, rows, columns): row i from its column rows - 1 - i on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return _diagonals(x.contiguous()).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dx = grad.new_zeros(ctx.shape)
        _diagonals(dx).copy_(grad)
        return dx


def _diagonals(x: Tensor) -> Tensor:
    n, heads, rows, wide = x.shape
    columns = wide + 1 - rows
    start = x.storage_offset() + rows - 1
    return x.as_strided((n, heads, rows, columns), (heads * rows * wide, rows * wide, wide - 1, 1), start)


@dataclass(frozen=True)
class Distances:
    """What stands for a key's distance from its query.

    Attributes:
        keys: (heads, 2 * m - 1, head_dim), with which the query is multiplied; row m - 1 + d is for a key d places
            after it. m is at least the length of the longest sequence. queries: the same, with which the key is.
            None: no such product.
    """

    keys: Tensor | None
    queries: Tensor | None

    def of_heads(self, first: int, heads: int) -> "Distances":
        """The same for some of the heads."""
        return Distances(*(None if x is None else x.narrow(0, first, heads) for x in (self.keys, self.queries)))

    def scores(self, q: Tensor, k: Tensor, first: int = 0) -> Tensor:
        """(n, heads, queries, keys), the sum of both products, not scaled.

        q: (n, heads, queries, head_dim), of which the first stands at place `first`. k: (n, heads, keys, head_dim).
        """
        rows, columns = q.shape[2], k.shape[2]
        total = None
        if self.keys is not None:
            total = _Diagonals.apply(q @ self._reach(self.keys, rows, columns, first).transpose(1, 2))
        if self.queries is not None:
            # Of keys, the other way round: column c is for a query c - (columns - 1) places after it.
            of_keys = self._reach(self.queries, rows, columns, first).flip(1)
            added = _Diagonals.apply(k @ of_keys.transpose(1, 2)).transpose(2, 3)
            total = added if total is None else total + added
        assert total is not None
        return total

    @staticmethod
    def _reach(table: Tensor, rows: int, columns: int, first: int) -> Tensor:
        """(heads, rows + columns - 1, head_dim): of the distances from that of the first key and the last query on.
        Distances that only padding has are zeros."""
        low = table.shape[1] // 2 + 1 - rows - first
        high = low + rows + columns - 1
        before, after = max(0, -low), max(0, high - table.shape[1])
        part = table[:, max(0, low) : min(high, table.shape[1])]
        return F.pad(part, (0, 0, before, after)) if before or after else part
