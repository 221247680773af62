"""Attention of packed sequences on the CPU: the compiled operator (csrc/cpu/attention.h) takes each sequence and head
by itself, in the caches, without padding, copies or stored weights. `serves` says where it is there, and fast."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library
from engine.ops.autograd import once_differentiable


class Heads(NamedTuple):
    """heads: of the queries. kv_heads: of keys and values; `heads` is a multiple. scale: of the scores.
    causal: a query sees itself and what is before it, with `window` no more than so many of these, itself among them.
    """

    heads: int
    kv_heads: int
    scale: float
    causal: bool = False
    window: int | None = None


class Dropped(NamedTuple):
    """Which weights are dropped, each with probability p: query i of head h draws as channel j, for the key at place j,
    of token tokens[i] + (first_head + h) 2^20 (engine.ops.dropout_masks). tokens: (T,) int64, None: 0, 1, 2, ...
    """

    p: float = 0.0
    key: int = 0
    site: int = 0
    tokens: Tensor | None = None
    first_head: int = 0


def serves(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the compiled operator takes these tensors, and is fast on this CPU."""
    return library.takes_fp32(q, k, v, bias) and library.cpu().isa != "plain"


NOTHING_DROPPED = Dropped()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        cu_queries: Tensor,
        cu_keys: Tensor,
        heads: Heads,
        dropped: Dropped,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        bias = None if bias is None else bias.contiguous()
        out, sums = torch.empty_like(q), q.new_empty(q.shape[0], heads.heads, 2)
        tokens = None if dropped.tokens is None else dropped.tokens.contiguous()
        inputs = q, k, v, cu_queries, cu_keys, bias, tokens
        ctx.settings = (
            heads.heads, heads.kv_heads, heads.scale, heads.causal, heads.window or 0, dropped.key, dropped.site,
            dropped.first_head, round(dropped.p * 65536),
        )  # fmt: skip
        torch.ops.modelcenter.attention_(out, sums, *inputs, *ctx.settings)
        ctx.save_for_backward(out, sums, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, sums, *inputs = ctx.saved_tensors
        q, k, v, _, _, bias, _ = inputs
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dbias = torch.empty_like(bias) if ctx.needs_input_grad[3] else None
        torch.ops.modelcenter.attention_backward_(
            dq, dk, dv, dbias, grad.contiguous(), out, sums, *inputs, *ctx.settings
        )
        return dq, dk, dv, dbias, None, None, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    heads: Heads,
    bias: Tensor | None = None,
    dropped: Dropped = NOTHING_DROPPED,
) -> Tensor:
    """dropout(softmax(scale q k^T + bias)) v inside each sequence.

    Args:
        q: (T, heads * head_dim) fp32. k, v: (S, kv_heads * head_dim). cu_queries, cu_keys: (n + 1,) of an integer type,
            rising from 0 to T and S: sequence i is rows cu[i] : cu[i + 1]. bias: (heads, 2 * m - 1), m no less than the
            longest sequence: column m - 1 + d for a key d places after its query.

    Returns:
        (T, heads * head_dim); zeros where a sequence has no keys.
    """
    offsets = [cu.int().contiguous() for cu in (cu_queries, cu_keys)]
    if round(dropped.p * 65536) == 65536:  # so near to 1 that 16 bits keep none
        return F.dropout(_Attention.apply(q, k, v, bias, *offsets, heads, NOTHING_DROPPED), 1.0)
    return _Attention.apply(q, k, v, bias, *offsets, heads, dropped)
