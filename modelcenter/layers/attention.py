"""Attention over packed tokens: no T x T mask, no padding beyond what a bucket of similar lengths needs.

On a CPU sequences of similar length are attended as one rectangle (`Packed.buckets`) by one autograd function: it keeps
the softmax and a byte mask, and writes gradients without zero-filling. On CUDA without dropout it is torch's
variable-length flash attention; otherwise scaled_dot_product_attention per bucket.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops import eager, keep_mask
from modelcenter.layers.linear import Linear
from modelcenter.layers.packing import Bucket, Packed


def _gather(x: Tensor, bucket: Bucket, heads: int) -> Tensor:
    """(T, heads * head_dim) -> (n, heads, length, head_dim)."""
    rows = x[bucket.start : bucket.stop] if bucket.index is None else x.index_select(0, bucket.index)
    return rows.view(bucket.n, bucket.length, heads, -1).transpose(1, 2)


def _matrices(x: Tensor, bucket: Bucket, heads: int) -> Tensor:
    """(T, heads * head_dim) -> (n * heads, length, head_dim), contiguous, for batched products."""
    return _gather(x, bucket, heads).reshape(bucket.n * heads, bucket.length, -1)


def _scatter(out: Tensor, x: Tensor, bucket: Bucket) -> None:
    """Write (n * heads, length, head_dim) back to the bucket's rows of `out` (T, heads * head_dim)."""
    rows = x.view(bucket.n, -1, bucket.length, x.shape[2]).transpose(1, 2)
    if bucket.index is None:
        out[bucket.start : bucket.stop].view(rows.shape).copy_(rows)
        return
    rows = rows.reshape(-1, out.shape[1])
    if bucket.tokens is None:
        out.index_copy_(0, bucket.index, rows)
    else:
        out.index_copy_(0, bucket.real, rows.index_select(0, bucket.tokens))


class _BucketedAttention(torch.autograd.Function):
    """dropout(softmax(q k^T / sqrt(head_dim))) v per bucket, on the CPU. q, k, v, out: (T, heads * head_dim)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packed, heads: int, p: float) -> Tensor:
        ctx.packed, ctx.heads, ctx.keep_scale = packed, heads, 1.0
        ctx.scale = 1.0 / math.sqrt(q.shape[1] // heads)
        out = torch.empty_like(q)
        saved: list[Tensor | None] = []
        for bucket in packed.buckets():
            qb, kb, vb = (_matrices(x, bucket, heads) for x in (q, k, v))
            scores = torch.bmm(qb, kb.transpose(1, 2)).mul_(ctx.scale)
            if bucket.keep is not None:
                by_row = scores.view(bucket.n, heads, bucket.length, bucket.length)
                by_row.masked_fill_(~bucket.keep[:, None, None, :], -math.inf)
            probs, mask = torch.softmax(scores, -1), None
            if p:
                mask, ctx.keep_scale = keep_mask(probs.shape, p)
                mixed = torch.bmm(probs * mask, vb).mul_(ctx.keep_scale)
            else:
                mixed = torch.bmm(probs, vb)
            _scatter(out, mixed, bucket)
            saved += [qb, kb, vb, probs, mask]
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = (torch.empty_like(grad) for _ in range(3))
        saved = ctx.saved_tensors
        for i, bucket in enumerate(ctx.packed.buckets()):
            qb, kb, vb, probs, mask = saved[5 * i : 5 * i + 5]
            go = _matrices(grad, bucket, ctx.heads)
            if bucket.keep is not None:  # a row of padding repeats a token, and must not send its gradient again
                by_row = go.view(bucket.n, ctx.heads, bucket.length, -1)
                go = (by_row * bucket.keep[:, None, :, None]).view(go.shape)
            dprobs, dropped = torch.bmm(go, vb.transpose(1, 2)), probs
            if mask is not None:
                dprobs.mul_(mask)
                dropped = probs * mask
            _scatter(dv, torch.bmm(dropped.transpose(1, 2), go).mul_(ctx.keep_scale), bucket)
            dscores = torch._softmax_backward_data(dprobs, probs, -1, probs.dtype).mul_(ctx.scale * ctx.keep_scale)
            _scatter(dq, torch.bmm(dscores, kb), bucket)
            _scatter(dk, torch.bmm(dscores.transpose(1, 2), qb), bucket)
        return dq, dk, dv, None, None, None


_cpu_attention = eager(_BucketedAttention.apply, "modelcenter.layers.attention._BucketedAttention")


@eager
def _bucketed_sdpa(q: Tensor, k: Tensor, v: Tensor, packed: Packed, heads: int, p: float) -> Tensor:
    """The same arithmetic by torch's scaled_dot_product_attention, any device; also the reference of the CPU path."""
    mixed, places = [], []
    for bucket in packed.buckets():
        mask = None if bucket.keep is None else bucket.keep[:, None, None, :]
        qb, kb, vb = (_gather(x, bucket, heads) for x in (q, k, v))
        rows = F.scaled_dot_product_attention(qb, kb, vb, attn_mask=mask, dropout_p=p).transpose(1, 2).flatten(0, 1)
        rows = rows.flatten(1)
        if bucket.tokens is not None:
            rows = rows.index_select(0, bucket.tokens)
        mixed.append(rows)
        index = torch.arange(bucket.start, bucket.stop, device=q.device) if bucket.index is None else bucket.index
        places.append(index if bucket.tokens is None else bucket.real)
    if not mixed:
        return torch.zeros_like(q) + 0 * (q + k + v)  # no token on this rank: keep the graph whole
    return torch.empty_like(q).index_copy(0, torch.cat(places), torch.cat(mixed))


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, heads: int, p: float = 0.0) -> Tensor:
    """Bidirectional attention inside each sequence.

    Args:
        q, k, v: (T, heads * head_dim). packed: where the sequences lie. p: dropout probability on the weights.

    Returns:
        (T, heads * head_dim)
    """
    if packed.split is not None and packed.split.size > 1:
        return _shared_attention(q, k, v, packed, heads, p)
    return _attention(q, k, v, packed, heads, p)


def _shared_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, heads: int, p: float) -> Tensor:
    """Attention of this rank's tokens where several ranks share the tokens (context parallelism)."""
    split = packed.split
    if heads % split.size == 0:
        parts = split.to_heads(torch.stack((q, k, v), 1)).unbind(1)
        return split.to_tokens(_attention(*(x.contiguous() for x in parts), packed, heads // split.size, p))
    k, v = (x.contiguous() for x in split.gather(torch.stack((k, v), 1)).unbind(1))
    mixed = []
    for piece in packed.own_pieces():
        own, all_of_them = slice(*piece.rows), slice(*piece.tokens)
        if piece.packed is not None:
            mixed.append(_attention(q[own], k[all_of_them], v[all_of_them], piece.packed, heads, p))
        else:
            one = (x.unflatten(1, (heads, -1)).transpose(0, 1)[None] for x in (q[own], k[all_of_them], v[all_of_them]))
            mixed.append(F.scaled_dot_product_attention(*one, dropout_p=p)[0].transpose(0, 1).flatten(1))
    return torch.cat(mixed)


def _attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, heads: int, p: float) -> Tensor:
    if q.device.type == "cpu":
        return _cpu_attention(q, k, v, packed, heads, p)
    if p == 0.0 and q.dtype in (torch.bfloat16, torch.float16) and packed.num_tokens:
        from torch.nn.attention.varlen import varlen_attn

        parts = (x.unflatten(1, (heads, -1)) for x in (q, k, v))
        ends, longest = packed.cu_seqlens, packed.max_seqlen
        return varlen_attn(*parts, ends, ends, longest, longest).flatten(1)
    return _bucketed_sdpa(q, k, v, packed, heads, p)


class SelfAttention(nn.Module):
    """Multi-head self-attention. x: (T, hidden_size) -> (T, hidden_size)."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, hidden_size // num_heads, dropout
        self.q = Linear(hidden_size, hidden_size)
        self.k = Linear(hidden_size, hidden_size)
        self.v = Linear(hidden_size, hidden_size)
        self.out = Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        p = self.dropout if self.training else 0.0
        q, k, v = self.q(x), self.k(x), self.v(x)
        # Under tensor parallelism q, k and v are some of the heads.
        return self.out(packed_attention(q, k, v, ctx, q.shape[1] // self.head_dim, p))
