"""Attention of packed sequences on the CPU whose scores know distances: the compiled operator (csrc/cpu/distances.h).
Products for distances, like scores, never leave the caches. `attention.serves` says where it is there, and fast."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.attention import NOTHING_DROPPED, Dropped, Heads
from engine.ops.autograd import Function, once_differentiable


class _ByDistances(Function):
    """numbers: heads, scale, causal, window, key, site, first_head, threshold."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        keys: Tensor | None,
        queries: Tensor | None,
        tokens: Tensor | None,
        *numbers: Any,
    ) -> Tensor:
        heads, *_ = ctx.numbers = numbers
        out, sums = torch.empty_like(q), q.new_empty(q.shape[0], heads, 2)
        inputs = q, k, v, cu_seqlens, keys, queries, tokens
        torch.ops.modelcenter.attention_by_distances_(out, sums, *inputs, *numbers)
        ctx.save_for_backward(out, sums, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: recomputation gives them once
        _, _, q, k, v, _, *tables, _ = saved
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dkeys, dqueries = (
            torch.empty_like(x) if x is not None and needed else None
            for x, needed in zip(tables, ctx.needs_input_grad[4:6], strict=True)
        )
        torch.ops.modelcenter.attention_by_distances_backward_(
            dq, dk, dv, dkeys, dqueries, grad.contiguous(), *saved, *ctx.numbers
        )
        return dq, dk, dv, None, dkeys, dqueries, *(None,) * (1 + len(ctx.numbers))


def attention_by_distances(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    heads: Heads,
    keys: Tensor | None,
    queries: Tensor | None,
    dropped: Dropped = NOTHING_DROPPED,
) -> Tensor:
    """dropout(softmax(scale (q k^T + q keys^T + k queries^T))) v of each sequence to itself; a query's product with
    `keys`, and a key's with `queries`, is that with the row for their distance.

    Args:
        q, k, v: (T, heads * head_dim) fp32. cu_seqlens: (n + 1,) of an integer type, rising from 0 to T: sequence i is
            rows cu[i] : cu[i + 1]. heads: as many for keys and values. keys, queries: (2 * m - 1, heads * head_dim)
            fp32, m no less than the longest sequence: row m - 1 + d for a key d places after its query. None: no such
            product.

    Returns:
        (T, heads * head_dim)
    """
    p, key, site, tokens, first_head = dropped
    threshold = round(p * 65536)
    if threshold == 65536:  # so near to 1 that 16 bits keep none
        return F.dropout(attention_by_distances(q, k, v, cu_seqlens, heads, keys, queries), 1.0)
    numbers = heads.heads, heads.scale, heads.causal, heads.window or 0, key, site, first_head, threshold
    inputs = [x if x is None else x.contiguous() for x in (q, k, v, cu_seqlens.int(), keys, queries, tokens)]
    return _ByDistances.apply(*inputs, *numbers)
