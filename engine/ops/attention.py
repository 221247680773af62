"""Attention of packed sequences on the CPU. The compiled operator (csrc/cpu/attention.h) works on one sequence and head
at a time, within the caches, without padding, copies or stored weights. `serves` says whether it is available and
fast."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library
from engine.ops.autograd import Function, once_differentiable
from engine.ops.compilation import host_number
from engine.torch_compat import may_round_products


class Heads(NamedTuple):
    """heads: of the queries. kv_heads: of keys and values; divides `heads`. scale: factor of the scores.
    causal: a query sees itself and the tokens before it. window: it only sees tokens less than this distance away.
    cap: above 0; a scaled score s becomes cap tanh(s / cap), before bias and mask (Gemma 2); None: no cap.
    """

    heads: int
    kv_heads: int
    scale: float
    causal: bool = False
    window: int | None = None
    cap: float | None = None

    def numbers(self) -> tuple[int, int, float, bool, int, float, bool]:
        """The arguments of the compiled operator; the last says whether it may round factors to bf16."""
        may_round = not torch.compiler.is_compiling() and may_round_products()
        return self.heads, self.kv_heads, self.scale, self.causal, self.window or 0, self.cap or 0.0, may_round


class Dropped(NamedTuple):
    """Which attention weights are dropped, each with probability p. The weight of query i and key j in head h uses the
    random bits of channel j of token tokens[i] + (first_head + h) 2^20 (engine.ops.dropout_masks, also for key and
    site). tokens: (T,) int64; None: 0, 1, 2, ...
    """

    p: float = 0.0
    key: int | Tensor = 0
    site: int | Tensor = 0
    tokens: Tensor | None = None
    first_head: int = 0


class Rules(NamedTuple):
    """Attention rules between segments: which keys a query sees, and the bias of their scores, by the tokens' kinds.

    kinds: (T,) int32, the kind of each token, numbered from 0 in each sequence. counts: (n,) int32, the number of kinds
    in each sequence. rules: int32, for each sequence (count, count), a row per kind of query and a column per kind of
    key. -1: the query does not see the key. Otherwise 2 * number, plus 1 if the query sees only keys that are not after
    it; number is 0 to add `bias`, or 1 + the column of `segment_bias` that is added instead.
    """

    kinds: Tensor
    rules: Tensor
    counts: Tensor


def serves(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> bool:
    """Whether the compiled operator takes these tensors, and is fast on this CPU."""
    if torch.compiler.is_compiling():
        return library.loaded_isa not in ("", "plain") and library.plain_fp32(q, k, v, *biases)
    return library.takes_fp32(q, k, v, *biases) and library.cpu().isa != "plain"


NOTHING_DROPPED = Dropped()

_KEY = 7  # index of the key in the numbers of the compiled operator, after those of `Heads`


def run(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """(attention, the row statistics that backward needs), without autograd.

    arguments: those of `Attention`, contiguous; with segments followed by the fields of `Rules` and segment_bias
    (heads, width).
    """
    heads = arguments[6]
    out, sums = torch.empty_like(q), q.new_empty(q.shape[0], heads, 2)
    torch.ops.modelcenter.attention_(out, sums, q, *arguments)
    return out, sums


def run_backward(
    grad: Tensor, need_bias: bool, out: Tensor, sums: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, and of the bias if needed.

    arguments: those of `run`; with segments followed by the tensor for the gradient of segment_bias, or None.
    """
    q, k, v, _, _, bias, *_ = arguments
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dbias = torch.empty_like(bias) if need_bias else None
    torch.ops.modelcenter.attention_backward_(dq, dk, dv, dbias, grad.contiguous(), out, sums, *arguments)
    return dq, dk, dv, dbias


class Attention(Function):
    """numbers: those of `Heads`, key, site, first_head, threshold; in a compiled graph key and site are tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_queries: Tensor,
        cu_keys: Tensor,
        bias: Tensor | None,
        tokens: Tensor | None,
        *numbers: Any,
    ) -> Tensor:
        ctx.numbers = numbers
        inputs = q, k, v, cu_queries, cu_keys, bias, tokens
        call = torch.ops.modelcenter_graph.attention_part if isinstance(numbers[_KEY], Tensor) else run
        out, sums = call(*inputs, *numbers)
        ctx.save_for_backward(out, sums, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_bias = ctx.needs_input_grad[5]
        in_graph = isinstance(ctx.numbers[_KEY], Tensor)
        call = torch.ops.modelcenter_graph.attention_backward_part if in_graph else run_backward
        dq, dk, dv, dbias = call(grad, need_bias, *ctx.saved_tensors, *ctx.numbers)
        return dq, dk, dv, None, None, dbias if need_bias else None, *(None,) * 12


class AttentionBySegments(Function):
    """numbers: those of `Heads`, key, site, first_head, threshold."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        bias: Tensor | None,
        segment_bias: Tensor | None,
        tokens: Tensor | None,
        rules: Rules,
        *numbers: Any,
    ) -> Tensor:
        ctx.numbers, ctx.rules = numbers, rules
        inputs = q, k, v, cu_seqlens, cu_seqlens, bias, tokens
        out, sums = run(*inputs, *numbers, *rules, segment_bias)
        ctx.save_for_backward(out, sums, *inputs, segment_bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_bias, need_segment_bias = ctx.needs_input_grad[4:6]
        *saved, segment_bias = ctx.saved_tensors
        between = torch.empty_like(segment_bias) if need_segment_bias else None
        *grads, dbias = run_backward(grad, need_bias, *saved, *ctx.numbers, *ctx.rules, segment_bias, between)
        return *grads, None, dbias, between, *(None,) * (2 + len(ctx.numbers))


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
    """dropout(softmax(capped(scale q k^T) + bias)) v inside each sequence.

    Args:
        q: (T, heads * head_dim) fp32. k, v: (S, kv_heads * head_dim). cu_queries, cu_keys: (n + 1,) integers, rising
            from 0 to T and S: sequence i is rows cu[i] : cu[i + 1]. bias: (heads, 2 * m - 1), m at least the length of
            the longest sequence: column m - 1 + d is for keys d places after their query.

    Returns:
        (T, heads * head_dim); zeros where a sequence has no keys.
    """
    offsets = [cu.int().contiguous() for cu in (cu_queries, cu_keys)]
    p, key, site, tokens, first_head = dropped
    threshold = round(p * 65536)
    if threshold == 65536:  # so close to 1 that 16 bits keep nothing
        return F.dropout(attention(q, k, v, cu_queries, cu_keys, heads, bias), 1.0)
    inputs = [x if x is None else x.contiguous() for x in (q, k, v, *offsets, bias, tokens)]
    if torch.compiler.is_compiling():
        key, site = host_number(key), host_number(site)
        return torch.ops.modelcenter_graph.attention(*inputs, *heads.numbers(), key, site, first_head, threshold)
    return Attention.apply(*inputs, *heads.numbers(), key, site, first_head, threshold)


def attention_by_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    heads: Heads,
    rules: Rules,
    bias: Tensor | None = None,
    segment_bias: Tensor | None = None,
    dropped: Dropped = NOTHING_DROPPED,
) -> Tensor:
    """`attention` of each sequence to itself, with the masks of `rules` in place of those of `heads`.

    Args:
        segment_bias: (heads, ...), see `Rules`; only together with a bias.
    """
    p, key, site, tokens, first_head = dropped
    threshold = round(p * 65536)
    if threshold == 65536:
        return F.dropout(attention_by_segments(q, k, v, cu_seqlens, heads, rules, bias, segment_bias), 1.0)
    between = None if segment_bias is None else segment_bias.flatten(1)
    inputs = [x if x is None else x.contiguous() for x in (q, k, v, cu_seqlens.int(), bias, between, tokens)]
    return AttentionBySegments.apply(*inputs, rules, *heads.numbers(), key, site, first_head, threshold)
