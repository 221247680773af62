"""What a token sees of its sequence, and what is added to its scores: masks and position biases of rectangles."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelcenter.layers.buckets import Bucket
from modelcenter.layers.packing import Packed
from modelcenter.layers.segments import Segments, with_segment_bias
from modelcenter.layers.sequences import Sequences

Rectangles = tuple[Tensor, ...]


def toeplitz(bias: Tensor, rows: int, columns: int, first: int = 0) -> Tensor:
    """(heads, 2 * m - 1) -> (heads, rows, columns), from the last row to the first, which is place `first`; a view."""
    (heads, width), (apart, step) = bias.shape, bias.stride()
    start = bias.storage_offset() + (width // 2 + 1 - rows - first) * step
    return bias.as_strided((heads, rows, columns), (apart, step, step), start)


def add_diagonals_(dbias: Tensor, x: Tensor, first: int = 0) -> None:
    """Add the gradient of what `toeplitz` gives, x (heads, rows, columns) from the first row to the last, to that of
    the bias."""
    heads, rows, columns = x.shape
    start, wide = dbias.shape[1] // 2 + 1 - rows - first, rows + columns - 1
    skewed = F.pad(x.flip(1), (0, rows)).view(heads, rows * (wide + 1))
    dbias[:, start : start + wide].add_(skewed[:, : rows * wide].view(heads, rows, wide).sum(1))


class _Diagonals(torch.autograd.Function):
    """The bias of a rectangle. Taken by an index, its gradient would be sorted by that on a GPU, in each layer."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, queries: int, keys: int, first: int) -> Tensor:
        ctx.shape, ctx.first = bias.shape, first
        return toeplitz(bias, queries, keys, first).flip(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dbias = grad.new_zeros(ctx.shape)
        if grad.numel():
            add_diagonals_(dbias, grad, ctx.first)
        return dbias, None, None, None


@dataclass(frozen=True)
class Mask:
    """What a token sees of its sequence.

    Attributes:
        causal: itself and what is before it. window: only what is less than so many places away.
        bias: (heads, 2 * n - 1), added to the scores: column n - 1 + d is for a key d places after the query. n is at
            least the length of the longest sequence.
        segments: of all tokens; they say who sees whom in place of the rest (layers.segments). segment_bias: (heads,
            kinds, ...), added in place of `bias` where query and key are of different segments; needs those two.
        rectangles: what all this comes to in each rectangle of the batch, where it is known (`shared_rectangles`).
    """

    causal: bool = False
    window: int | None = None
    bias: Tensor | None = None
    segments: Segments | None = None
    segment_bias: Tensor | None = None
    rectangles: Rectangles | None = None

    def hidden(
        self,
        queries: int,
        keys: int,
        first: int = 0,
        device: torch.device | None = None,
        keep: Tensor | None = None,
    ) -> Tensor | None:
        """(queries, keys) bool, True where a query must not look; the queries start at place `first`. None: nowhere.

        keep: (n, keys), False at padding, which stands behind the tokens: then what becomes (n, 1, queries, keys) by
            broadcasting. Queries of padding see some key, for a softmax of nothing is no number.
        """
        window = None if self.window is None or self.window >= max(first + queries, keys) else self.window
        padding = None if keep is None or self.causal else ~keep[:, None, None, :]  # a causal one stands before it
        if window is None and not self.causal:
            return padding
        ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
        hidden = ones.triu(first + 1) if self.causal or window is None else ones.triu(first + window)
        if window is not None:
            hidden |= ones.tril(first - window)
        return hidden if padding is None else (hidden | padding) & ~(ones.tril(first) & ones.triu(first))

    def additive(self, queries: int, keys: int, first: int = 0) -> Tensor | None:
        """(heads, queries, keys), the bias of such a rectangle, differentiable; 0 where only padding is so far away."""
        if (bias := self.bias) is None:
            return None
        if (more := max(first + queries, keys) - (bias.shape[1] // 2 + 1)) > 0:
            bias = F.pad(bias, (more, more))
        return _Diagonals.apply(bias, queries, keys, first)

    def of_heads(self, first: int, heads: int) -> "Mask":
        """The same for some of the heads."""
        if self.bias is None:
            return self
        segment_bias = None if self.segment_bias is None else self.segment_bias.narrow(0, first, heads)
        rectangles = self.rectangles and tuple(x.narrow(-3, first, heads) for x in self.rectangles)
        return replace(self, bias=self.bias.narrow(0, first, heads), segment_bias=segment_bias, rectangles=rectangles)

    def of_tokens(self, start: int, stop: int) -> "Mask":
        """The same for the tokens start to stop - 1 as if they were all."""
        return self if self.segments is None else replace(self, segments=self.segments[start:stop])

    def bucket_segments(self, bucket: Bucket) -> Segments | None:
        """Segments (n, length) of a bucket's tokens, padding included."""
        if self.segments is None:
            return None
        tokens = slice(bucket.start, bucket.stop) if bucket.index is None else bucket.index
        return self.segments[tokens].view(bucket.n, bucket.length)

    def rectangle(
        self,
        queries: int,
        keys: int,
        keep: Tensor | None = None,
        *,
        like: Tensor,
        first: int = 0,
        segments: tuple[Segments | None, Segments | None] = (None, None),
    ) -> Tensor | None:
        """What scaled_dot_product_attention takes: False, or -inf beside a bias, where a query must not look.

        Args:
            keep: (n, keys), False at padding. like: of whose device and dtype. first: place of the first query.
            segments: of queries and keys.

        Returns:
            What becomes (n, heads, queries, keys) by broadcasting. None: each query sees each key.
        """
        added, hidden = self.additive(queries, keys, first), None
        if segments[0] is not None and segments[1] is not None:
            hidden = segments[0].hidden(segments[1], first)
            if keep is not None:
                hidden = hidden | ~keep[:, None, None, :]
            if added is not None and self.segment_bias is not None:
                added = with_segment_bias(self.segment_bias, added, segments[0], segments[1])
        else:
            hidden = self.hidden(queries, keys, first, like.device, keep)
        seen = None if hidden is None else ~hidden
        if added is None:
            return seen
        return added.to(like.dtype) if seen is None else torch.where(seen, added.to(like.dtype), -math.inf)

    def of_buckets(self, queries: Bucket, keys: Bucket, like: Tensor) -> Tensor | None:
        """`rectangle` of two buckets of the same sequences; what queries of padding see has no meaning."""
        segments = self.bucket_segments(queries), self.bucket_segments(keys)
        return self.rectangle(queries.length, keys.length, keys.keep, like=like, segments=segments)


NO_MASK = Mask()

# Strides of this many elements are what torch's kernels take a bias with; any other it copies, in each layer.
_ALIGNED = 16


def _aligned(whole: Tensor) -> Tensor:
    keys = whole.shape[-1]
    return F.pad(whole, (0, -keys % _ALIGNED))[..., :keys] if keys % _ALIGNED else whole


def aligned_rectangles(sequences: Sequences, mask: Mask) -> Rectangles:
    """`mask`, which has a bias, in each rectangle of the batch: (n, heads, length, length), or without n the same for
    all its sequences."""
    assert mask.bias is not None
    found = []
    for queries, keys in sequences.bucket_pairs():
        whole = mask.of_buckets(queries, keys, mask.bias)
        assert whole is not None
        found.append(_aligned(whole))
    return tuple(found)


def hidden_rectangles(sequences: Sequences, memory: Sequences | None, mask: Mask, like: Tensor) -> list[Tensor | None]:
    """`mask`, which has no bias, in each rectangle of the batch, as numbers that are added to the scores: of False and
    True torch would make these in each layer. like: of whose device and dtype. None: each query sees each key."""
    found: list[Tensor | None] = []
    for queries, keys in sequences.bucket_pairs(memory):
        if (seen := mask.of_buckets(queries, keys, like)) is not None:
            seen = _aligned(like.new_zeros(seen.shape).masked_fill(~seen, -math.inf))
        found.append(seen)
    return found


def shared_rectangles(packed: Packed, mask: Mask) -> Rectangles | None:
    """`aligned_rectangles` for all layers that share a bias. Made by a layer, each would keep its own for backward, as
    large as the scores.

    None where attention does not ask for them: on a CPU, beside a cache, and where several ranks share the tokens.
    """
    assert mask.bias is not None
    if mask.bias.device.type == "cpu" or packed.cache is not None or packed.split is not None:
        return None
    return aligned_rectangles(packed.sequences, mask)
