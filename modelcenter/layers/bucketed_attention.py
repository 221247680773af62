"""Attention on rectangles: sequences of similar length are padded to one length and processed together.

On a CPU this is one autograd function. It keeps the softmax (for long sequences it recomputes that in backward, as it
always does dropout masks), and writes gradients without zero-filling. Elsewhere it is scaled_dot_product_attention for
each rectangle (layers.bucketed_sdpa).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.ops.autograd import Function, once_differentiable
from modelcenter.layers.attention_options import AttentionOptions
from modelcenter.layers.bucketed_sdpa import bucketed_sdpa
from modelcenter.layers.buckets import Bucket, Pairs, Places
from modelcenter.layers.distances import NO_DISTANCES, Distances, add_scores_, gradients
from modelcenter.layers.mask import Mask, add_diagonals_, toeplitz
from modelcenter.layers.segments import Segments, with_segment_bias


def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Pairs,
    options: AttentionOptions,
    seen: Sequence[Tensor | None] | None = None,
    places: tuple[Places, Places] | None = None,
) -> Tensor:
    """q (T, heads * head_dim), k and v (T', kv_heads * head_dim), in rectangles of both -> (T, heads * head_dim).

    seen: the mask of each pair, and places: where queries and keys are in the pairs, if these are known already; not
    used on a CPU.
    """
    if q.device.type == "cpu":
        mask = options.mask
        tables = options.distances or NO_DISTANCES
        plain = options._replace(mask=replace(mask, bias=None, segment_bias=None), distances=None)
        return _BucketedAttention.apply(q, k, v, mask.bias, mask.segment_bias, *tables, pairs, plain)
    return bucketed_sdpa(q, k, v, pairs, options, seen, places)


def _gather(x: Tensor, bucket: Bucket, heads: int) -> Tensor:
    """(T, heads * head_dim) -> (n, heads, length, head_dim)."""
    rows = x[bucket.start : bucket.stop] if bucket.index is None else x.index_select(0, bucket.index)
    return rows.view(bucket.n, bucket.length, heads, -1).transpose(1, 2)


def _matrices(x: Tensor, bucket: Bucket, heads: int, groups: int) -> Tensor:
    """(T, heads * head_dim) -> (n * groups, heads / groups * length, head_dim), contiguous, for batched products.

    Query heads that share a key head become further rows of one matrix.
    """
    rows = _gather(x, bucket, heads)
    return rows.reshape(bucket.n * groups, heads // groups * bucket.length, rows.shape[3])


def _scatter(out: Tensor, x: Tensor, bucket: Bucket, heads: int) -> None:
    """Write (n * groups, heads / groups * length, head_dim) to the bucket's rows of `out`."""
    rows = x.view(bucket.n, heads, bucket.length, x.shape[2]).transpose(1, 2)
    if bucket.index is None:
        out[bucket.start : bucket.stop].view(rows.shape).copy_(rows)
        return
    rows = rows.reshape(-1, out.shape[1])
    if bucket.tokens is None or bucket.real is None:
        out.index_copy_(0, bucket.index, rows)
    else:
        out.index_copy_(0, bucket.real, rows.index_select(0, bucket.tokens))


def _partial(pairs: Pairs, tokens: int, side: int = 0) -> bool:
    """Whether the buckets leave out some of the tokens."""
    return (
        sum(b.n * b.length if b.tokens is None else b.tokens.numel() for b in (pair[side] for pair in pairs)) < tokens
    )


class _Tile(NamedTuple):
    """Queries `start` to `stop` - 1 of each sequence of a rectangle, with all keys."""

    queries: Bucket
    keys: Bucket
    start: int
    stop: int

    def of(self, rows: Tensor) -> Tensor:
        """(n * groups, heads / groups * length, ...) of the rectangle -> the rows of these queries."""
        parts = rows.view(rows.shape[0], -1, self.queries.length, *rows.shape[2:])
        return parts[:, :, self.start : self.stop].flatten(1, 2)

    def by_head(self, rows: Tensor, length: int | None = None) -> Tensor:
        """(n * groups, heads / groups * length, ...) -> (n, heads, length, ...); length: None: the tile's queries."""
        return rows.view(self.queries.n, -1, self.stop - self.start if length is None else length, rows.shape[2])

    def segments(self, mask: Mask) -> tuple[Segments, Segments] | None:
        """Of the queries and of the keys, which are of the same sequences."""
        of_keys = mask.bucket_segments(self.queries)
        return None if of_keys is None else (of_keys[:, self.start : self.stop], of_keys)


# Up to _KEPT scores of a rectangle, over all heads, are computed at once and kept for backward. Larger rectangles are
# computed in tiles of _TILE scores, and again in backward, because memory would grow with the square of the length.
_KEPT, _TILE = 1 << 24, 1 << 22


def _tiles(queries: Bucket, keys: Bucket, heads: int) -> list[_Tile]:
    row, length = queries.n * heads * keys.length, queries.length
    step = length if row * length <= _KEPT else max(1, _TILE // row)
    return [_Tile(queries, keys, start, min(start + step, length)) for start in range(0, length, step)]


def _joined(parts: Sequence[Tensor], tiles: Sequence[_Tile]) -> Tensor:
    """The reverse of `_Tile.of`."""
    if len(tiles) == 1:
        return parts[0]
    rows = [x.view(x.shape[0], -1, tile.stop - tile.start, x.shape[2]) for x, tile in zip(parts, tiles, strict=True)]
    return torch.cat(rows, 2).flatten(1, 2)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    """total + part, in fp32 if there are several parts; may change `total`."""
    return part if total is None else total.float().add_(part)


class _BucketedAttention(Function):
    """dropout(softmax(scale (q k^T + distances) + bias)) v per bucket, on the CPU. q, out: (T, heads * head_dim).

    The biases and distances are arguments, not part of the options, since they have gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        segment_bias: Tensor | None,
        of_distance_k: Tensor | None,
        of_distance_q: Tensor | None,
        pairs: Pairs,
        options: AttentionOptions,
    ) -> Tensor:
        of_queries, of_keys, drop = options.heads, options.kv_heads, options.drop
        ctx.pairs, ctx.options, ctx.bias, ctx.segment_bias = pairs, options, bias, segment_bias
        ctx.tables = tables = Distances(of_distance_k, of_distance_q)
        ctx.key, ctx.numbers, ctx.shapes = drop.key if drop.p else 0, [], (q.shape, k.shape, v.shape)
        out = torch.zeros_like(q) if _partial(pairs, q.shape[0]) else torch.empty_like(q)
        saved: list[Tensor | None] = []
        for queries, keys in pairs:
            qb = _matrices(q, queries, of_queries, of_keys)
            kb, vb = (_matrices(x, keys, of_keys, of_keys) for x in (k, v))
            numbers: Tensor | None = None
            if drop.p:
                places = slice(queries.start, queries.stop) if queries.index is None else queries.index
                numbers = drop.numbers(q.shape[0], places, queries.n, of_queries).view(*qb.shape[:2])
            ctx.numbers.append(numbers)
            tiles, mixed = _tiles(queries, keys, of_queries), []
            for tile in tiles:
                probs, slopes = _weights(tile.of(qb), kb, tile, bias, segment_bias, tables, options)
                dropped = probs
                if numbers is not None:
                    dropped = drop.drop(probs, ctx.key, tile.of(numbers).flatten())
                mixed.append(torch.bmm(dropped, vb))
            _scatter(out, _joined(mixed, tiles), queries, of_queries)
            saved += [qb, kb, vb, *((probs, slopes) if len(tiles) == 1 else (None, None))]
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bias, segment_bias, tables = ctx.bias, ctx.segment_bias, ctx.tables
        options: AttentionOptions = ctx.options
        of_queries, of_keys, drop = options.heads, options.kv_heads, options.drop
        dq, dk, dv = (
            (grad.new_zeros if _partial(ctx.pairs, shape[0], side) else grad.new_empty)(shape)
            for shape, side in zip(ctx.shapes, (0, 1, 1), strict=True)
        )
        needed = any(ctx.needs_input_grad[3:5])  # ALiBi's does not train, nor does a frozen one
        biases = (bias, segment_bias) if needed else (None, None)
        dbias, dsegment_bias = (None if x is None else torch.zeros_like(x) for x in biases)
        dtables = tables.zeros()
        saved = ctx.saved_tensors
        for i, (queries, keys) in enumerate(ctx.pairs):
            qb, kb, vb, probs, slopes = saved[5 * i : 5 * i + 5]
            go = _matrices(grad, queries, of_queries, of_keys)
            if queries.keep is not None:  # rows of padding repeat a token, whose gradient must not count twice
                by_head = go.view(queries.n, of_queries, queries.length, -1)
                go = (by_head * queries.keep[:, None, :, None]).view(go.shape)
            tiles, of_tiles = _tiles(queries, keys, of_queries), []
            dkb: Tensor | None = None
            dvb: Tensor | None = None
            for tile in tiles:
                qt, got = tile.of(qb), tile.of(go)
                if len(tiles) > 1:
                    probs, slopes = _weights(qt, kb, tile, bias, segment_bias, tables, options)
                dprobs, dropped = torch.bmm(got, vb.transpose(1, 2)), probs
                if drop.p:
                    numbers = tile.of(ctx.numbers[i]).flatten()
                    dprobs, dropped = (drop.drop(x, ctx.key, numbers) for x in (dprobs, probs))
                dvb = _plus(dvb, torch.bmm(dropped.transpose(1, 2), got))
                dscores = torch._softmax_backward_data(dprobs, probs, -1, probs.dtype)
                if dbias is not None:
                    _add_gradients_of_bias_(dbias, dsegment_bias, tile.by_head(dscores), tile, options.mask)
                dscores.mul_(options.scale if slopes is None else slopes)
                dqt = torch.bmm(dscores, kb)
                dkb = _plus(dkb, torch.bmm(dscores.transpose(1, 2), qt))
                sides = tile.by_head(qt), tile.by_head(kb, tile.keys.length)
                more_q, more_k = gradients(tile.by_head(dscores), *sides, tables, dtables, tile.start)
                dqt = dqt if more_q is None else dqt.add_(more_q.reshape(dqt.shape))
                dkb = dkb if more_k is None else dkb.add_(more_k.reshape(dkb.shape))
                of_tiles.append(dqt)
            assert dkb is not None and dvb is not None
            _scatter(dq, _joined(of_tiles, tiles), queries, of_queries)
            _scatter(dk, dkb.to(dk.dtype), keys, of_keys)
            _scatter(dv, dvb.to(dv.dtype), keys, of_keys)
        of_tables = (None if x is None else x.to(dq.dtype) for x in dtables)
        return dq, dk, dv, dbias, dsegment_bias, *of_tables, None, None


def _weights(
    q: Tensor,
    k: Tensor,
    tile: _Tile,
    bias: Tensor | None,
    segment_bias: Tensor | None,
    tables: Distances,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor | None]:
    """The softmax of a tile and, if scores are capped, the derivative of each score with respect to its product (else
    None: it is the scale).

    q: (n * groups, heads / groups * queries, head_dim). k: (n * groups, keys, head_dim).
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    add_scores_(tile.by_head(scores), tile.by_head(q), tile.by_head(k, tile.keys.length), tables, tile.start)
    slopes = None
    if options.cap is None:
        scores.mul_(options.scale)
    else:
        scores.mul_(options.scale / options.cap).tanh_()
        slopes = scores.square().neg_().add_(1).mul_(options.scale)
        scores.mul_(options.cap)
    _add_bias_and_mask_(tile.by_head(scores), bias, segment_bias, options.mask, tile)
    return torch.softmax(scores, -1), slopes


def _add_bias_and_mask_(
    scores: Tensor, bias: Tensor | None, segment_bias: Tensor | None, mask: Mask, tile: _Tile
) -> None:
    """Add the biases to scores (n, heads, queries, keys), and set them to -inf where a query must not look."""
    (*_, rows, columns), first, keep = scores.shape, tile.start, tile.keys.keep
    segments = tile.segments(mask)
    if bias is not None:
        added = toeplitz(bias, rows, columns, first).flip(1)
        if segment_bias is not None and segments is not None:
            added = with_segment_bias(segment_bias, added, *segments)
        scores.add_(added)
    hidden: Tensor | None
    if segments is not None:
        hidden = segments[0].hidden(segments[1], first)
        hidden = hidden if keep is None else hidden | ~keep[:, None, None, :]
    else:
        hidden = mask.hidden(rows, columns, first, keep=keep)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)


def _add_gradients_of_bias_(
    dbias: Tensor, dsegment_bias: Tensor | None, dscores: Tensor, tile: _Tile, mask: Mask
) -> None:
    """Add what scores (n, heads, queries, keys) with these gradients give to those of the biases."""
    segments = tile.segments(mask)
    if dsegment_bias is not None and segments is not None:
        differ = segments[0].differ(segments[1])
        segments[0].add_pairs_(dsegment_bias, dscores * differ, segments[1])
        dscores = dscores.masked_fill(differ, 0.0)
    add_diagonals_(dbias, dscores.sum(0), tile.start)
