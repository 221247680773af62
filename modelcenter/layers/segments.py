"""Attention masks and biases that depend on the context, span and segment of tokens.

CPM-Ant and CPM-Bee use them (after CPM-Live).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.ops.attention import Rules
from modelcenter.layers.relative import RelativeBias

_MOST_RULES = 64  # per token on average: with more, a table of kinds is no smaller than the scores


@dataclass(frozen=True)
class Segments:
    """The context flag, span and segment of each token.

    A token of the context attends to the whole context; any other token attends to the context, to earlier tokens and
    to itself. Both attend only to tokens of their own span.

    Attributes:
        values: integers (..., 3): 1 in the context and 0 outside it, the number of the span, the number of the segment.
    """

    values: Tensor

    @classmethod
    def of(cls, context: Tensor, span: Tensor, segment: Tensor) -> "Segments":
        """From three tensors of the same shape."""
        return cls(torch.stack((context.long(), span.long(), segment.long()), -1))

    def __getitem__(self, index: Any) -> "Segments":
        return replace(self, values=self.values[index])

    def view(self, *shape: int) -> "Segments":
        return replace(self, values=self.values.view(*shape, self.values.shape[-1]))

    def field(self, number: int, of_keys: bool = False) -> Tensor:
        """One of the values, broadcastable for comparison: (n, m, 1) for queries, (n, 1, k) for keys."""
        return self.values[..., number].unsqueeze(1 if of_keys else 2)

    def hidden(self, keys: "Segments", first: int | Tensor = 0) -> Tensor:
        """The mask of these queries (n, m) and keys (n, k): (n, 1, m, k) bool, True where attention is masked.

        first: position of the first query among the keys, one for all or (n,).
        """
        queries, device = self.values.shape[1], self.values.device
        place = torch.arange(queries, device=device) + (first.view(-1, 1) if isinstance(first, Tensor) else first)
        before = torch.arange(keys.values.shape[1], device=device) <= place.view(-1, queries, 1)
        seen = keys.field(0, True).bool() | (before & ~self.field(0).bool())
        return ~(seen & (self.field(1) == keys.field(1, True)))[:, None]

    def differ(self, keys: "Segments") -> Tensor:
        """(n, 1, m, k) bool: whether query and key are in different segments."""
        return (self.field(2) != keys.field(2, True))[:, None]

    def pairs(self, keys: "Segments", kinds: int) -> Tensor:
        """(n, m, k) number of the pair of their segments, below `kinds` squared."""
        return self.field(2) * kinds + keys.field(2, True)

    def add_pairs_(self, sums: Tensor, x: Tensor, keys: "Segments") -> None:
        """Add x (n, heads, m, k) to `sums` (heads, kinds, ...) at the pairs of these queries and keys."""
        pairs = self.pairs(keys, sums.shape[1]).flatten()
        sums.view(sums.shape[0], -1).index_add_(1, pairs, x.transpose(0, 1).flatten(1).to(sums.dtype))


@dataclass(frozen=True)
class RelatedSegments(Segments):
    """Segments of CPM-Bee: a table gives the relation of any two segments, and tokens also belong to samples.

    A token of sample 0 attends to all samples, any other token only to its own.

    Attributes:
        values: integers (..., 6): as in Segments, then the number of the sample, its number of segments, and the offset
            of its table in `relations`: the relation of segment a to b is at offset + a * segments + b.
        relations: integers (size,): 0: the same segment, in which the distance counts; else the kind of relation.
            Tokens of different samples or spans have relation 1.
    """

    relations: Tensor

    def relation(self, keys: Segments) -> Tensor:
        """(n, m, k)"""
        together = (self.field(1) == keys.field(1, True)) & (self.field(3) == keys.field(3, True))
        index = self.field(5) + self.field(2) * self.field(4) + keys.field(2, True)
        return self.relations[index.masked_fill(~together, 0)].masked_fill(~together, 1)

    def hidden(self, keys: Segments, first: int | Tensor = 0) -> Tensor:
        elsewhere = (self.field(3) != 0) & (self.field(3) != keys.field(3, True))
        return super().hidden(keys, first) | elsewhere[:, None]

    def differ(self, keys: Segments) -> Tensor:
        return (self.relation(keys) != 0)[:, None]

    def pairs(self, keys: Segments, kinds: int) -> Tensor:
        """(n, m, k) number of the relation, from 0; undefined inside a segment."""
        return (self.relation(keys) - 1).clamp(min=0)


def rules_of(segments: Segments, cu_seqlens: Tensor, kinds: int | None) -> Rules | None:
    """The segments of all tokens in the form that the compiled attention takes; None: there are too many kinds.

    cu_seqlens: (n + 1,), on the host. kinds: as in `Segments.pairs`; None: nothing is added between segments.
    """
    n = cu_seqlens.numel() - 1
    number = torch.arange(n).repeat_interleave(cu_seqlens.long().diff())
    rows = torch.cat((number[:, None], segments.values.view(number.numel(), -1)), 1)
    starts = torch.ones(number.numel(), dtype=torch.bool)  # tokens that differ from the one before
    starts[1:] = (rows[1:] != rows[:-1]).any(1)
    found, kind_of_run = rows[starts].unique(dim=0, return_inverse=True)
    counts = found[:, 0].bincount(minlength=n)
    squares = counts.square()
    if int(squares.sum()) > _MOST_RULES * max(number.numel(), _MOST_RULES):
        return None
    first = counts.cumsum(0) - counts
    kind = kind_of_run[starts.long().cumsum(0) - 1] - first[number]
    # All pairs of kinds in a sequence, as rows of one query and one key: the key before the query, and after it.
    of = torch.arange(n).repeat_interleave(squares)
    place = torch.arange(of.numel()) - (squares.cumsum(0) - squares)[of]
    queries, keys = (
        replace(segments, values=found[first[of] + x, None, 1:]) for x in (place // counts[of], place % counts[of])
    )
    before, after = queries.hidden(keys).flatten(), queries.hidden(keys, -1).flatten()
    rules = after.long()
    if kinds is not None:
        rules += 2 * torch.where(queries.differ(keys).flatten(), queries.pairs(keys, kinds).flatten() + 1, 0)
    rules[before] = -1
    return Rules(kind.int(), rules.int(), counts.int())


def with_segment_bias(segment_bias: Tensor, bias: Tensor, queries: Segments, keys: Segments) -> Tensor:
    """(n, heads, m, k): `bias` of that shape inside a segment, `segment_bias` (heads, kinds, ...) between segments."""
    pairs = segment_bias.flatten(1)[:, queries.pairs(keys, segment_bias.shape[1])].transpose(0, 1)
    return torch.where(queries.differ(keys), pairs, bias)


class RelationBias(RelativeBias):
    """A relative position bias inside a segment; between two segments, a bias per kind of relation.

    Attributes:
        weight: (num_buckets, num_heads). pairs: (kinds, num_heads).
    """

    def __init__(self, num_buckets: int, num_heads: int, max_distance: int, kinds: int):
        """`kinds`: the number of kinds of relations."""
        super().__init__(num_buckets, num_heads, max_distance, bidirectional=True)
        self.pairs = nn.Parameter(torch.empty(kinds, num_heads).normal_(std=0.02))

    def forward(self, longest: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """`bias` and `segment_bias` of layers.mask.Mask, for sequences of up to `longest` tokens."""
        return super().forward(longest), self.pairs.t()


class SegmentBias(RelationBias):
    """As RelationBias, with a relation per pair of segments: the query's and the key's."""

    def __init__(self, num_buckets: int, num_heads: int, max_distance: int, kinds: int):
        """`kinds`: the number of kinds of segments."""
        super().__init__(num_buckets, num_heads, max_distance, kinds * kinds)
        self.kinds = kinds

    def forward(self, longest: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        bias, pairs = super().forward(longest)
        return bias, pairs.unflatten(1, (self.kinds, self.kinds))
