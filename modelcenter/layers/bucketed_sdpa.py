"""Attention over rectangles by torch's scaled_dot_product_attention: used on a GPU, and on a CPU the reference of
layers.bucketed_attention. It supports no soft cap of the scores; see layers.capped_attention.

One gather moves the tokens into the rectangles of all groups and one moves them back, in forward and in backward.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import eager
from engine.ops.autograd import Function
from modelcenter.layers.attention_options import AttentionOptions
from modelcenter.layers.buckets import Pairs, Places, make_places
from modelcenter.layers.capped_attention import capped_attention
from modelcenter.layers.dropout import AttentionDropout


def _rectangles(rows: Tensor, places: Places, heads: int) -> list[Tensor]:
    """(slots, heads * head_dim) -> (n, heads, length, head_dim) for each rectangle; views."""
    shapes = places.shapes
    parts = rows.split_with_sizes([n * length for n, length in shapes]) if len(shapes) > 1 else (rows,)
    return [part.view(n, length, heads, -1).transpose(1, 2) for part, (n, length) in zip(parts, shapes, strict=True)]


def _rows(rectangles: Sequence[Tensor]) -> Tensor:
    """The inverse of `_rectangles`, for one or several of its results."""
    parts = [x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3]) for x in rectangles]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _take(rows: Tensor, index: Tensor | None, zeros: Tensor | None) -> Tensor:
    """The rows with these indices; `zeros`: the rows of the result that are 0 instead."""
    if index is None:
        return rows
    found = rows.index_select(0, index)
    return found if zeros is None else found.index_fill_(0, zeros, 0.0)


class _ToRectangles(Function):
    """Several tensors (tokens, heads * head_dim) -> the rectangles of each, (n, heads, length, head_dim), in order.

    places, heads: of each tensor. In backward the gradient of a token is gathered from its only slot; index_select's
    backward would fill a tensor with zeros and add to it. Padding has no gradient, because it is never read.
    """

    @staticmethod
    def forward(ctx: Any, places: tuple[Places, ...], heads: tuple[int, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.places, ctx.widths = places, [x.shape[1] for x in xs]
        found: list[Tensor] = []
        for x, of, number in zip(xs, places, heads, strict=True):
            found += _rectangles(_take(x, of.index, None), of, number)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places, widths, needed = ctx.places, ctx.widths, ctx.needs_input_grad[2:]
        count = len(places[0].shapes)

        def alike(i: int) -> tuple[Any, ...]:
            # With one rectangle each, their rows need not be concatenated first.
            return (id(places[i]), widths[i], needed[i]) if count > 1 else (i,)

        found: list[Tensor | None] = []
        for _, numbers in groupby(range(len(places)), alike):
            first, *more = numbers
            size = 1 + len(more)
            if not needed[first]:
                found += [None] * size
                continue
            of = places[first]
            at, outside = (of.at, of.outside) if size == 1 else of.repeated(size)
            rows = _take(_rows(grads[first * count : (first + size) * count]), at, outside)
            found += rows.chunk(size) if size > 1 else [rows]
        return None, None, *found


class _FromRectangles(Function):
    """The rectangles, (n, heads, length, head_dim) -> (tokens, heads * head_dim); 0 at a token without a slot."""

    @staticmethod
    def forward(ctx: Any, places: Places, *rectangles: Tensor) -> Tensor:
        ctx.places, ctx.heads = places, rectangles[0].shape[1]
        return _take(_rows(rectangles), places.at, places.outside)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        places = ctx.places
        # A padding row repeats a token, whose gradient must not be counted twice.
        return None, *_rectangles(_take(grad, places.index, places.padding), places, ctx.heads)


def _to_rectangles(xs: Sequence[tuple[Tensor, Places, int]]) -> list[list[Tensor]]:
    """Tensors with their slots and heads -> the rectangles of each."""
    found = [_rectangles(x, places, heads) if places.index is None else [] for x, places, heads in xs]
    moved = [i for i, (_, places, _) in enumerate(xs) if places.index is not None]
    if moved:
        tensors, places, heads = zip(*(xs[i] for i in moved), strict=True)
        flat, count = _ToRectangles.apply(places, heads, *tensors), len(places[0].shapes)
        for i, number in enumerate(moved):
            found[number] = list(flat[i * count : (i + 1) * count])
    return found


def _from_rectangles(rectangles: Sequence[Tensor], places: Places) -> Tensor:
    return _rows(rectangles) if places.index is None else _FromRectangles.apply(places, *rectangles)


def places_of(pairs: Pairs, q: Tensor, k: Tensor) -> tuple[Places, Places]:
    """The slots of queries and keys in these rectangles."""
    queries, keys = ([pair[side] for pair in pairs] for side in (0, 1))
    of_queries = make_places(queries, q.shape[0], q.device)
    same = all(a is b for a, b in pairs)
    return of_queries, of_queries if same else make_places(keys, k.shape[0], k.device)


def bucketed_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Pairs,
    options: AttentionOptions,
    seen: Sequence[Tensor | None] | None = None,
    places: tuple[Places, Places] | None = None,
) -> Tensor:
    """As `bucketed_attention`, on any device.

    q, k and v are gathered into rectangles once, and the results are gathered back once, however many there are.
    """
    mask = options.mask
    distances = options.distances
    if not pairs:  # no token on this rank: keep the graph whole
        inputs = q, k, v, mask.bias, mask.segment_bias, *(distances or ())
        return torch.zeros_like(q) + 0 * sum(x.sum() for x in inputs if x is not None)
    if places is None:
        places = places_of(pairs, q, k)
    of_queries, of_keys = places
    parts = _to_rectangles([(q, of_queries, options.heads), *((x, of_keys, options.kv_heads) for x in (k, v))])
    mixed = []
    for i, (qb, kb, vb) in enumerate(zip(*parts, strict=True)):
        rectangle = mask.of_buckets(*pairs[i], q) if seen is None else seen[i]
        if distances is not None:
            rectangle = with_scores(distances.scores(qb, kb) * options.scale, rectangle)
        mixed.append(sdpa(qb, kb, vb, rectangle, options))
    return _from_rectangles(mixed, of_queries)


def with_scores(scores: Tensor, seen: Tensor | None) -> Tensor:
    """Add scores (n, heads, queries, keys) to the result of Mask.rectangle."""
    if seen is None:
        return scores
    return scores.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else scores + seen


def sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, options: AttentionOptions, first: int = 0) -> Tensor:
    """Attention over one rectangle, (n, heads, length, head_dim); `seen` as returned by Mask.rectangle for queries from
    position `first` on."""
    scale, drop = options.scale, options.drop
    if options.cap is not None:
        return capped_attention(q, k, v, seen, options, first)
    if drop.p and q.device.type == "cpu":
        return _dropping(q, k, v, seen, scale, drop)
    call = F.scaled_dot_product_attention if q.device.type == "cpu" else _without_cudnn
    grouped = q.shape[1] != k.shape[1]
    return call(q, k, v, attn_mask=seen, dropout_p=drop.p, scale=scale, enable_gqa=grouped)


@eager
def _without_cudnn(*args: Any, **kwargs: Any) -> Tensor:
    """scaled_dot_product_attention without cuDNN, which torch prefers on some GPUs: cuDNN has no gradient for a bias,
    and makes a new plan for each shape."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(*args, **kwargs)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# The key changes at each step, so it must not become a constant of a compiled graph.
@eager
def _dropping(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, drop: AttentionDropout) -> Tensor:
    """Attention over one rectangle in torch operators, with dropout masks derived from query, head and key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * scale
    if seen is not None:
        scores = with_scores(scores, seen)
    n, heads, length = q.shape[:3]
    numbers = drop.numbers(n * length, slice(0, n * length), n, heads)
    return drop.drop(scores.softmax(-1), drop.key, numbers) @ v
