"""Marks on tokens, from which follows who sees whom: the attention of CPM-Ant and CPM-Bee (after CPM-Live)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelcenter.layers.relative import RelativeBias


@dataclass(frozen=True)
class Marks:
    """What tokens say of themselves.

    A token of the context sees the context; any other sees that too, and what is not after it; both only in their own
    span.

    Attributes:
        values: integers (..., 3): whether in the context (1 or 0), number of the span, number of the segment.
    """

    values: Tensor

    @classmethod
    def of(cls, context: Tensor, span: Tensor, segment: Tensor) -> "Marks":
        """From three tensors of one shape."""
        return cls(torch.stack((context.long(), span.long(), segment.long()), -1))

    def __getitem__(self, index: Any) -> "Marks":
        return replace(self, values=self.values[index])

    def view(self, *shape: int) -> "Marks":
        return replace(self, values=self.values.view(*shape, 3))

    def hidden(self, keys: "Marks", first: int | Tensor = 0) -> Tensor:
        """Of queries (n, m) and keys (n, k): (n, 1, m, k) bool, True where a query must not look.

        first: place of the first query among the keys, one for all or (n,).
        """
        queries, device = self.values.shape[1], self.values.device
        place = torch.arange(queries, device=device) + torch.as_tensor(first, device=device).view(-1, 1)
        before = torch.arange(keys.values.shape[1], device=device) <= place[:, :, None]
        (context, span, _), (of_keys, spans, _) = (x.values.unbind(-1) for x in (self, keys))
        seen = of_keys[:, None, :].bool() | (before & ~context[:, :, None].bool())
        return ~(seen & (span[:, :, None] == spans[:, None, :]))[:, None]

    def apart(self, keys: "Marks") -> Tensor:
        """(n, 1, m, k) bool: the two are of different segments."""
        return (self.values[..., 2][:, :, None] != keys.values[..., 2][:, None, :])[:, None]

    def pairs(self, keys: "Marks", kinds: int) -> Tensor:
        """(n, m, k) number of the pair of their segments, of `kinds` squared."""
        return self.values[..., 2][:, :, None] * kinds + keys.values[..., 2][:, None, :]

    def add_pairs_(self, sums: Tensor, x: Tensor, factor: float) -> None:
        """Add x (n, heads, m, m) to `sums` (heads, kinds, kinds) at the pairs of these tokens."""
        pairs = self.pairs(self, sums.shape[1]).flatten()
        sums.view(sums.shape[0], -1).index_add_(1, pairs, x.transpose(0, 1).flatten(1), alpha=factor)


def by_pair(others: Tensor, bias: Tensor, queries: Marks, keys: Marks) -> Tensor:
    """(n, heads, m, k): `bias` of such a shape, or `others` (heads, kinds, kinds) where the segments differ."""
    pairs = others.flatten(1)[:, queries.pairs(keys, others.shape[1])].transpose(0, 1)
    return torch.where(queries.apart(keys), pairs, bias)


class SegmentBias(RelativeBias):
    """A relative position bias inside a segment, and between two segments a number for each pair of them.

    Attributes:
        weight: (num_buckets, num_heads). pairs: (kinds * kinds, num_heads), by the query's segment and the key's.
    """

    def __init__(self, num_buckets: int, num_heads: int, max_distance: int, kinds: int):
        """`kinds`: of segments."""
        super().__init__(num_buckets, num_heads, max_distance, bidirectional=True)
        self.kinds = kinds
        self.pairs = nn.Parameter(torch.empty(kinds * kinds, num_heads).normal_(std=0.02))

    def forward(self, longest: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """`bias` and `others` of layers.packed_attention.Mask, for sequences of up to `longest` tokens."""
        return super().forward(longest), self.pairs.t().unflatten(1, (self.kinds, self.kinds))
