"""Attention over packed tokens: no T x T mask, no padding beyond what a bucket of similar lengths needs.

On a CPU that the compiled operator is made for (engine.ops.attention) it takes each sequence by itself. Elsewhere on a
CPU, in other types than fp32 and by segments, sequences of similar length are attended as one rectangle
(`Sequences.buckets`) by one autograd function: it keeps the softmax, draws dropout's masks anew in backward, and writes
gradients without zero-filling. On CUDA in 16 bits without a bias it is torch's variable-length flash attention;
otherwise scaled_dot_product_attention per bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import attention, eager
from engine.ops.autograd import once_differentiable
from modelcenter.layers.buckets import Bucket
from modelcenter.layers.dropout import NO_DROPOUT, AttentionDropout
from modelcenter.layers.mask import NO_MASK, Mask, add_diagonals_, toeplitz
from modelcenter.layers.packing import Packed
from modelcenter.layers.segments import with_segment_bias
from modelcenter.layers.sequences import Sequences

Pairs = Sequence[tuple[Bucket, Bucket]]


def _gather(x: Tensor, bucket: Bucket, heads: int) -> Tensor:
    """(T, heads * head_dim) -> (n, heads, length, head_dim)."""
    rows = x[bucket.start : bucket.stop] if bucket.index is None else x.index_select(0, bucket.index)
    return rows.view(bucket.n, bucket.length, heads, -1).transpose(1, 2)


def _matrices(x: Tensor, bucket: Bucket, heads: int, groups: int) -> Tensor:
    """(T, heads * head_dim) -> (n * groups, heads / groups * length, head_dim), contiguous, for batched products.

    The query heads that share a key head are so many more rows of one matrix.
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
    if bucket.tokens is None:
        out.index_copy_(0, bucket.index, rows)
    else:
        out.index_copy_(0, bucket.real, rows.index_select(0, bucket.tokens))


class _BucketedAttention(torch.autograd.Function):
    """dropout(softmax(scale q k^T + bias)) v per bucket, on the CPU. q, out: (T, heads * head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        segment_bias: Tensor | None,
        mask: Mask,
        pairs: Pairs,
        heads: tuple[int, int],
        scale: float,
        drop: AttentionDropout,
    ) -> Tensor:
        ctx.mask, ctx.pairs, ctx.heads, ctx.scale = mask, pairs, heads, scale
        ctx.drop, ctx.key, ctx.numbers = drop, drop.key if drop.p else 0, []
        ctx.rows, ctx.bias, ctx.segment_bias = (q.shape, k.shape, v.shape), bias, segment_bias
        of_queries, of_keys = heads
        out = torch.zeros_like(q) if _partial(pairs, q.shape[0]) else torch.empty_like(q)
        saved: list[Tensor | None] = []
        for queries, keys in pairs:
            qb = _matrices(q, queries, of_queries, of_keys)
            kb, vb = (_matrices(x, keys, of_keys, of_keys) for x in (k, v))
            scores = torch.bmm(qb, kb.transpose(1, 2)).mul_(scale)
            by_row = scores.view(queries.n, of_queries, queries.length, keys.length)
            segments = mask.bucket_segments(queries)
            if bias is not None:
                added = toeplitz(bias, queries.length, queries.length).flip(1)
                by_row.add_(
                    added
                    if segment_bias is None or segments is None
                    else with_segment_bias(segment_bias, added, segments, segments)
                )
            if segments is not None:
                hidden = segments.hidden(segments)
                by_row.masked_fill_(hidden if keys.keep is None else hidden | ~keys.keep[:, None, None, :], -math.inf)
            elif (hidden := mask.hidden(queries.length, keys.length)) is not None:
                # no token sees the padding, which comes after all
                by_row.masked_fill_(hidden, -math.inf)
            elif keys.keep is not None:
                by_row.masked_fill_(~keys.keep[:, None, None, :], -math.inf)
            dropped = probs = torch.softmax(scores, -1)
            if drop.p:
                places = slice(queries.start, queries.stop) if queries.index is None else queries.index
                ctx.numbers.append(drop.numbers(q.shape[0], places, queries.n, of_queries))
                dropped = drop.drop(probs, ctx.key, ctx.numbers[-1])
            _scatter(out, torch.bmm(dropped, vb), queries, of_queries)
            saved += [qb, kb, vb, probs]
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_queries, of_keys = ctx.heads
        dq, dk, dv = (
            (grad.new_zeros if _partial(ctx.pairs, shape[0], side) else grad.new_empty)(shape)
            for shape, side in zip(ctx.rows, (0, 1, 1), strict=True)
        )
        dbias, dsegment_bias = (None if x is None else torch.zeros_like(x) for x in (ctx.bias, ctx.segment_bias))
        saved = ctx.saved_tensors
        for i, (queries, keys) in enumerate(ctx.pairs):
            qb, kb, vb, probs = saved[4 * i : 4 * i + 4]
            go = _matrices(grad, queries, of_queries, of_keys)
            if queries.keep is not None:  # a row of padding repeats a token, and must not send its gradient again
                by_row = go.view(queries.n, of_queries, queries.length, -1)
                go = (by_row * queries.keep[:, None, :, None]).view(go.shape)
            dprobs, dropped = torch.bmm(go, vb.transpose(1, 2)), probs
            if ctx.drop.p:
                dprobs, dropped = (ctx.drop.drop(x, ctx.key, ctx.numbers[i]) for x in (dprobs, probs))
            _scatter(dv, torch.bmm(dropped.transpose(1, 2), go), keys, of_keys)
            dscores = torch._softmax_backward_data(dprobs, probs, -1, probs.dtype)
            if dbias is not None:
                n = queries.length
                by_row, segments = dscores.view(queries.n, of_queries, n, n), ctx.mask.bucket_segments(queries)
                if dsegment_bias is not None and segments is not None:
                    differ = segments.differ(segments)
                    segments.add_pairs_(dsegment_bias, by_row * differ)
                    by_row = by_row.masked_fill(differ, 0.0)
                add_diagonals_(dbias, by_row.sum(0))
            dscores.mul_(ctx.scale)
            _scatter(dq, torch.bmm(dscores, kb), queries, of_queries)
            _scatter(dk, torch.bmm(dscores.transpose(1, 2), qb), keys, of_keys)
        return dq, dk, dv, dbias, dsegment_bias, None, None, None, None, None


def _partial(pairs: Pairs, tokens: int, side: int = 0) -> bool:
    """Whether the buckets leave out some of the tokens."""
    return (
        sum(b.n * b.length if b.tokens is None else b.tokens.numel() for b in (pair[side] for pair in pairs)) < tokens
    )


def _bucketed_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    pairs: Pairs,
    heads: tuple[int, int],
    scale: float,
    drop: AttentionDropout,
    seen: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """The same arithmetic by torch's scaled_dot_product_attention, any device; also the reference of the CPU path.

    seen: what `mask` gives for the pairs, where that is already known.
    """
    mixed, places = [], []
    for i, (queries, keys) in enumerate(pairs):
        qb = _gather(q, queries, heads[0])
        kb, vb = (_gather(x, keys, heads[1]) for x in (k, v))
        rectangle = mask.of_buckets(queries, keys, q) if seen is None else seen[i]
        rows = _sdpa(qb, kb, vb, rectangle, scale, drop).transpose(1, 2).flatten(0, 1).flatten(1)
        if queries.tokens is not None:
            rows = rows.index_select(0, queries.tokens)
        mixed.append(rows)
        index = torch.arange(queries.start, queries.stop, device=q.device) if queries.index is None else queries.index
        places.append(index if queries.tokens is None else queries.real)
    if not mixed:  # no token on this rank: keep the graph whole
        return torch.zeros_like(q) + 0 * sum(x.sum() for x in (q, k, v, mask.bias, mask.segment_bias) if x is not None)
    return torch.zeros_like(q).index_copy(0, torch.cat(places), torch.cat(mixed))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, drop: AttentionDropout) -> Tensor:
    """One rectangle, (n, heads, length, head_dim); `seen` as Mask.rectangle gives it."""
    if drop.p and q.device.type == "cpu":
        return _dropping(q, k, v, seen, scale, drop)
    call = F.scaled_dot_product_attention if q.device.type == "cpu" else _without_cudnn
    grouped = q.shape[1] != k.shape[1]
    return call(q, k, v, attn_mask=seen, dropout_p=drop.p, scale=scale, enable_gqa=grouped)


@eager
def _without_cudnn(*args: Any, **kwargs: Any) -> Tensor:
    """scaled_dot_product_attention, but not by cuDNN, which torch prefers on some GPUs: it has no gradient for a bias,
    and plans anew for each shape."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(*args, **kwargs)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# The key changes at each step: it must not be a constant of a compiled graph.
@eager
def _dropping(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, drop: AttentionDropout) -> Tensor:
    """One rectangle whose weights are dropped by query, head and key, by torch's operators."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else scores + seen
    n, heads, length = q.shape[:3]
    numbers = drop.numbers(n * length, slice(0, n * length), n, heads)
    return drop.drop(scores.softmax(-1), drop.key, numbers) @ v


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    heads: int,
    drop: AttentionDropout = NO_DROPOUT,
    *,
    kv_heads: int | None = None,
    mask: Mask = NO_MASK,
    memory: Sequences | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention inside each sequence, or of each sequence to the one of the same number in `memory`.

    Args:
        q: (T, heads * head_dim). k, v: (T, kv_heads * head_dim), or of the tokens of `memory`. packed: where the
            sequences lie. heads, kv_heads: `heads` is a multiple of `kv_heads`, None: the same. drop: which weights are
            dropped. scale: of the scores, None: 1 / sqrt(head_dim).

    Returns:
        (T, heads * head_dim)
    """
    kv_heads = kv_heads or heads
    scale = 1.0 / math.sqrt(q.shape[1] // heads) if scale is None else scale
    if packed.split is not None and packed.split.size > 1:
        return _shared_attention(q, k, v, packed, (heads, kv_heads), drop, mask, memory, scale)
    return _attention(q, k, v, packed.sequences, (heads, kv_heads), drop, mask, memory, scale)


def _shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    heads: tuple[int, int],
    drop: AttentionDropout,
    mask: Mask,
    memory: Sequences | None,
    scale: float,
) -> Tensor:
    """Attention of this rank's tokens where several ranks share the tokens (context parallelism)."""
    split = packed.split
    both = torch.stack((k, v), 1)
    if heads[0] % split.size == 0 and heads[1] % split.size == 0:
        own = heads[0] // split.size, heads[1] // split.size
        q = split.to_heads(q[:, None]).squeeze(1)
        k, v = (x.contiguous() for x in split.to_heads(both).unbind(1))
        mask, drop = mask.of_heads(split.rank * own[0], own[0]), drop.of_heads(split.rank * own[0])
        return split.to_tokens(_attention(q, k, v, packed.sequences, own, drop, mask, memory, scale))
    k, v = (x.contiguous() for x in split.gather(both).unbind(1))
    mixed, low = [], split.rank * packed.num_tokens
    for piece in packed.sequences.pieces(low, low + packed.num_tokens):
        rows, keys = slice(*piece.rows), slice(*piece.tokens)
        own_drop = drop.of_queries(*(low + row for row in piece.rows))
        of_memory = None
        if memory is not None:
            numbers = [min(number, memory.num_sequences) for number in piece.numbers]
            of_memory, keys = memory.part(*numbers), slice(*(memory.starts()[number] for number in numbers))
        if piece.whole is not None:
            part = mask.of_tokens(*piece.tokens)
            mixed.append(_attention(q[rows], k[keys], v[keys], piece.whole, heads, own_drop, part, of_memory, scale))
        elif of_memory is not None and not of_memory.num_sequences:  # the dummy sequence has no memory
            mixed.append(0 * q[rows])
        else:
            first = piece.first if memory is None else 0
            mixed.append(_attention_of_part(q[rows], k[keys], v[keys], heads, own_drop, mask, first, keys, scale))
    return torch.cat(mixed)


def _attention_of_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: tuple[int, int],
    drop: AttentionDropout,
    mask: Mask,
    first: int,
    keys: slice,
    scale: float,
) -> Tensor:
    """Attention of a part of one sequence, whose first token stands at place `first`, to the tokens `keys`."""
    parts = ((q, heads[0]), (k, heads[1]), (v, heads[1]))
    one = [x.unflatten(1, (n, -1)).transpose(0, 1)[None] for x, n in parts]
    sizes = one[0].shape[2], one[1].shape[2]
    of_keys = None if mask.segments is None else mask.segments[keys][None]
    of_queries = None if of_keys is None else of_keys[:, first : first + sizes[0]]
    seen = mask.rectangle(*sizes, like=q, first=first, segments=(of_queries, of_keys))
    return _sdpa(*one, seen, scale, drop)[0].transpose(0, 1).flatten(1)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    heads: tuple[int, int],
    drop: AttentionDropout,
    mask: Mask,
    memory: Sequences | None,
    scale: float,
) -> Tensor:
    plain = mask.bias is None and mask.segments is None
    if plain and _has_flash(q.device, q.dtype, q.shape[1] // heads[0], drop.p) and q.shape[0] and k.shape[0]:
        return _varlen(q, k, v, sequences, heads, mask, memory or sequences, scale, drop.p)
    return _in_buckets(q, k, v, sequences, heads, drop, mask, memory, scale)


def _has_flash(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Whether torch's flash attention takes these, forward and backward."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    widest = 192 if dropout else 256  # with dropout, backward of wider heads is for some GPUs only
    return head_dim % 8 == 0 and head_dim <= widest and torch.cuda.get_device_properties(device).major >= 8


@eager
def _in_buckets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    heads: tuple[int, int],
    drop: AttentionDropout,
    mask: Mask,
    memory: Sequences | None,
    scale: float,
) -> Tensor:
    offsets = sequences.cu_seqlens, sequences.cu_seqlens if memory is None else memory.cu_seqlens
    alike = mask.segments is None and drop.p < 1 and offsets[0].numel() == offsets[1].numel()
    if alike and attention.serves(q, k, v, mask.bias):
        if memory is not None:
            sequences.paired_lengths(memory)
        shape = attention.Heads(*heads, scale, mask.causal, mask.window)
        return attention.attention(q, k, v, *offsets, shape, mask.bias, drop.rule())
    pairs = sequences.bucket_pairs(memory)
    if q.device.type == "cpu":
        rest = replace(mask, bias=None, segment_bias=None)
        return _BucketedAttention.apply(q, k, v, mask.bias, mask.segment_bias, rest, pairs, heads, scale, drop)
    seen: Sequence[Tensor | None] | None = mask.rectangles
    if seen is None and mask.bias is None and mask.segments is None:
        key = "hidden", mask.causal, mask.window, memory
        seen = sequences.derived(key, lambda: [mask.of_buckets(*pair, q) for pair in pairs])
    return _bucketed_sdpa(q, k, v, mask, pairs, heads, scale, drop, seen)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    heads: tuple[int, int],
    mask: Mask,
    memory: Sequences,
    scale: float,
    dropout: float,
) -> Tensor:
    """The operator below `torch.nn.attention.varlen.varlen_attn`, which has no dropout, and on torch 2.11 may lack
    `enable_gqa`: fewer heads of keys than of queries are taken as they come."""
    parts = (x.unflatten(1, (n, -1)) for x, n in ((q, heads[0]), (k, heads[1]), (v, heads[1])))
    window = mask.window if mask.causal else None
    out, *_ = torch.ops.aten._flash_attention_forward(
        *parts,
        *_as_many(sequences.cu_seqlens, memory.cu_seqlens),
        sequences.max_seqlen,
        memory.max_seqlen,
        dropout,
        mask.causal and window is None,
        False,  # return_debug_mask
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if mask.causal else -1,
    )
    return out.flatten(1)


def _as_many(queries: Tensor, keys: Tensor) -> list[Tensor]:
    """Both offsets, for the same number of sequences: a dummy sequence that only one side has is empty on the other."""
    most = max(queries.numel(), keys.numel())
    return [x if x.numel() == most else torch.cat([x, x[-1:].expand(most - x.numel())]) for x in (queries, keys)]
