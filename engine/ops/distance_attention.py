"""Attention of packed sequences on the CPU whose scores depend on distances, by a compiled operator
(csrc/cpu/distances.h). Neither scores nor products with distances leave the caches. `attention.serves` says whether it
is available and fast."""

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
        saved = ctx.saved_tensors  # read once: recomputation returns them only once
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
    """dropout(softmax(scale (q k^T + q keys^T + k queries^T))) v of each sequence to itself. A query is multiplied by
    the row of `keys`, and a key by the row of `queries`, for their distance.

    Args:
        q, k, v: (T, heads * head_dim) fp32. cu_seqlens: (n + 1,) integers, rising from 0 to T: sequence i is rows
            cu[i] : cu[i + 1]. heads: kv_heads equals heads. keys, queries: (2 * m - 1, heads * head_dim) fp32, m at
            least the length of the longest sequence: row m - 1 + d is for a key d places after its query. None: no such
            product.

    Returns:
        (T, heads * head_dim)
    """
    p, key, site, tokens, first_head = dropped
    threshold = round(p * 65536)
    if threshold == 65536:  # so close to 1 that 16 bits keep nothing
        return F.dropout(attention_by_distances(q, k, v, cu_seqlens, heads, keys, queries), 1.0)
    numbers = heads.heads, heads.scale, heads.causal, heads.window or 0, key, site, first_head, threshold
    inputs = [x if x is None else x.contiguous() for x in (q, k, v, cu_seqlens.int(), keys, queries, tokens)]
    return _ByDistances.apply(*inputs, *numbers)
