"""Masks and position biases of rectangles: which keys a query may attend to, and what is added to the scores."""

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
    """(heads, 2 * m - 1) -> (heads, rows, columns), a view from the last row to the first, at position `first`."""
    (heads, width), (apart, step) = bias.shape, bias.stride()
    start = bias.storage_offset() + (width // 2 + 1 - rows - first) * step
    return bias.as_strided((heads, rows, columns), (apart, step, step), start)


def add_diagonals_(dbias: Tensor, x: Tensor, first: int = 0) -> None:
    """Add to the gradient `dbias` of the bias the gradient x (heads, rows, columns) of a rectangle, with the rows of x
    in order, unlike those of `toeplitz`."""
    heads, rows, columns = x.shape
    start, wide = dbias.shape[1] // 2 + 1 - rows - first, rows + columns - 1
    skewed = F.pad(x.flip(1), (0, rows)).view(heads, rows * (wide + 1))
    dbias[:, start : start + wide].add_(skewed[:, : rows * wide].view(heads, rows, wide).sum(1))


class _Diagonals(torch.autograd.Function):
    """The bias of a rectangle. The backward of an indexing operation would sort the indices on a GPU in each layer."""

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
    """Which tokens of its sequence a token attends to, and what is added to the scores.

    Attributes:
        causal: only itself and earlier tokens. window: only tokens less than this many positions away.
        bias: (heads, 2 * n - 1), added to the scores: column n - 1 + d is for a key d positions after the query. n is
            at least the length of the longest sequence.
        segments: of all tokens; they replace causal and window (layers.segments). segment_bias: (heads, kinds, ...),
            added instead of `bias` if query and key are in different segments; needs `segments` and `bias`.
        rectangles: the mask of each rectangle of the batch, if already computed (`shared_rectangles`).
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
        """(queries, keys) bool, True where attention is masked; the queries start at position `first`. None: no mask.

        keep: (n, keys), False at padding, which follows the tokens. The result is then broadcastable to (n, 1, queries,
            keys). Padding queries that see no key attend to all, because an empty softmax is NaN.
        """
        window = None if self.window is None or self.window >= max(first + queries, keys) else self.window
        padding = None if keep is None or self.causal else ~keep[:, None, None, :]  # a causal query precedes it
        if window is None and not self.causal:
            return padding
        ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
        hidden = ones.triu(first + 1) if self.causal or window is None else ones.triu(first + window)
        if window is not None:
            hidden |= ones.tril(first - window)
        if padding is None:
            return hidden
        hidden = hidden | padding
        return hidden & ~hidden.all(-1, keepdim=True)

    def additive(self, queries: int, keys: int, first: int = 0) -> Tensor | None:
        """(heads, queries, keys), the differentiable bias of such a rectangle; 0 at distances that only padding has."""
        if (bias := self.bias) is None:
            return None
        if (more := max(first + queries, keys) - (bias.shape[1] // 2 + 1)) > 0:
            bias = F.pad(bias, (more, more))
        return _Diagonals.apply(bias, queries, keys, first)

    def of_heads(self, first: int, heads: int) -> "Mask":
        """The mask of some of the heads."""
        if self.bias is None:
            return self
        segment_bias = None if self.segment_bias is None else self.segment_bias.narrow(0, first, heads)
        rectangles = self.rectangles and tuple(x.narrow(-3, first, heads) for x in self.rectangles)
        return replace(self, bias=self.bias.narrow(0, first, heads), segment_bias=segment_bias, rectangles=rectangles)

    def of_tokens(self, start: int, stop: int) -> "Mask":
        """The mask of the tokens start to stop - 1, as if there were no others."""
        return self if self.segments is None else replace(self, segments=self.segments[start:stop])

    def bucket_segments(self, bucket: Bucket) -> Segments | None:
        """Segments (n, length) of a bucket's tokens, including padding."""
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
        """The attn_mask of scaled_dot_product_attention: boolean, or the bias with -inf where attention is masked.

        Args:
            keep: (n, keys), False at padding. like: gives device and dtype. first: position of the first query.
            segments: of queries and keys.

        Returns:
            A tensor broadcastable to (n, heads, queries, keys). None: each query attends to each key.
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
        """`rectangle` for two buckets of the same sequences; which keys padding queries attend to is undefined."""
        segments = self.bucket_segments(queries), self.bucket_segments(keys)
        return self.rectangle(queries.length, keys.length, keys.keep, like=like, segments=segments)


NO_MASK = Mask()

# torch's kernels take a bias whose strides are multiples of this many elements; others are copied in each layer.
_ALIGNED = 16


def _aligned(whole: Tensor) -> Tensor:
    keys = whole.shape[-1]
    return F.pad(whole, (0, -keys % _ALIGNED))[..., :keys] if keys % _ALIGNED else whole


def aligned_rectangles(sequences: Sequences, mask: Mask) -> Rectangles:
    """`mask`, which has a bias, for each rectangle of the batch: (n, heads, length, length), or without n if it is the
    same for all sequences."""
    assert mask.bias is not None
    found = []
    for queries, keys in sequences.bucket_pairs():
        whole = mask.of_buckets(queries, keys, mask.bias)
        assert whole is not None
        found.append(_aligned(whole))
    return tuple(found)


def hidden_rectangles(sequences: Sequences, memory: Sequences | None, mask: Mask, like: Tensor) -> list[Tensor | None]:
    """`mask`, which has no bias, for each rectangle of the batch, as numbers to add to the scores: torch would convert
    booleans in each layer. like: gives device and dtype. None: each query attends to each key."""
    found: list[Tensor | None] = []
    for queries, keys in sequences.bucket_pairs(memory):
        if (seen := mask.of_buckets(queries, keys, like)) is not None:
            seen = _aligned(like.new_zeros(seen.shape).masked_fill(~seen, -math.inf))
        found.append(seen)
    return found


def shared_rectangles(packed: Packed, mask: Mask) -> Rectangles | None:
    """`aligned_rectangles` for all layers that share a bias. Otherwise each layer would keep its own for backward, as
    large as the scores.

    None if attention does not use them: on a CPU, with a cache, and if several ranks share the tokens.
    """
    assert mask.bias is not None
    if mask.bias.device.type == "cpu" or packed.cache is not None or packed.split is not None:
        return None
    return aligned_rectangles(packed.sequences, mask)
