"""Self-attention within a window and to global tokens, as in Longformer (Beltagy et al. 2020, arXiv:2004.05150), after
transformers' LongformerSelfAttention: without its padding to multiples of the window, and never with a T x T mask.

A token attends to those in its window and to the global tokens of its sequence, in one softmax, in which a global token
inside the window counts once. A global token attends to all tokens of its sequence, with projections of its own.

On CPUs that the compiled operator supports (engine.ops.attention), that operator processes the windows. Its output is
merged with that of the global tokens outside them, which are few, by the largest score and the sum of exponentials of
each query. In backward the operator gets the merged numbers, from which the weights of the common softmax follow.
Elsewhere the windows are processed in blocks of queries, in torch.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.ops import attention, eager
from engine.ops.autograd import Function, once_differentiable
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import unused
from modelcenter.layers.dropout import AttentionDropout, DrawingModule
from modelcenter.layers.global_tokens import FarSequence, GlobalTokens
from modelcenter.layers.linear import Linear, each
from modelcenter.layers.mask import Mask
from modelcenter.layers.packed_attention import packed_attention
from modelcenter.layers.packing import Packed

# Queries of a block of windows, at least. Blocks do not depend on the batch, so neither do the dropout masks.
_LEAST_BLOCK = 64
# Scores of global tokens outside windows that are computed at once, for each head.
_FAR_SCORES = 1 << 17


class GlobalAttention(SelfAttention):
    """Attention within a window, and to and from the tokens of `ctx.globals`. x: (T, hidden_size) -> the same, or (m,
    hidden_size) for `ctx.output_tokens`. Without such tokens it is SelfAttention with this window.

    `q_global`, `k_global` and `v_global` are the projections by which global tokens attend; others attend to them by
    `k` and `v`.
    """

    window: int

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, *, window: int):
        """window: a token sees those less than this many positions away."""
        super().__init__(hidden_size, num_heads, dropout, window=window)
        self.q_global = Linear(hidden_size, hidden_size)
        self.k_global = Linear(hidden_size, hidden_size)
        self.v_global = Linear(hidden_size, hidden_size)
        # Sites of dropout masks: the weights of one query and head are in three tensors.
        self.far_weights, self.global_weights = DrawingModule(), DrawingModule()

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        chosen: GlobalTokens | None = ctx.globals
        if chosen is None:
            plain = super().forward(x, ctx)
            if not torch.is_grad_enabled():
                return plain
            return unused(plain, self.q_global, self.k_global, self.v_global)
        split, heads_before = ctx.split, 0
        rows = [*each(x, self.q, self.k, self.v, self.k_global, self.v_global)]
        # Where several ranks share the tokens, the global ones are on one of them only before the projection.
        of_global = self.q_global(x if split is not None else x.index_select(0, chosen.tokens))
        if split is not None and split.size > 1:
            *rows, of_global = _all_tokens([*rows, of_global], split, self.head_dim)
            heads_before = split.rank * (rows[0].shape[1] // self.head_dim)
        if split is not None:
            of_global = of_global.index_select(0, chosen.tokens)
        q, k, v, k_global, v_global = rows
        drops = [
            AttentionDropout(drop.p, drop.draws, layer if drop.p else None, drop.first_head + heads_before)
            for drop in (self.weights_dropout(ctx),)
            for layer in (self, self.far_weights, self.global_weights)
        ]
        whole = replace(ctx, split=None)
        mixed = self._of_windows(q, k, v, whole, chosen, *drops[:2])
        mixed_global = self._of_global(of_global, k_global, v_global, whole, chosen, drops[2])
        mixed = mixed.index_copy(0, chosen.tokens, mixed_global.to(mixed.dtype))
        mixed = mixed if split is None or split.size == 1 else split.to_tokens(mixed)
        return self.out(ctx.scaled(ctx.narrow(mixed)))

    def _of_windows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: Packed,
        chosen: GlobalTokens,
        drop: AttentionDropout,
        far_drop: AttentionDropout,
    ) -> Tensor:
        """(T, heads * head_dim) what each token gets from its window and from global tokens.

        drop: of weights in windows. far_drop: of those of global tokens outside.
        """
        heads, scale = q.shape[1] // self.head_dim, self.head_dim**-0.5
        if not chosen.far(self.window):
            return packed_attention(q, k, v, ctx, heads, drop, mask=Mask(window=self.window), scale=scale)
        return _windows_and_far(q, k, v, ctx, chosen, (heads, scale, self.window), drop, far_drop)

    def _of_global(
        self, q: Tensor, k: Tensor, v: Tensor, ctx: Packed, chosen: GlobalTokens, drop: AttentionDropout
    ) -> Tensor:
        """(g, heads * head_dim) what the global tokens get from all tokens of their sequences."""
        heads, numbers = q.shape[1] // self.head_dim, drop.queries
        if numbers is not None:
            drop = replace(drop, tokens=numbers.index_select(0, chosen.tokens))
        own = replace(ctx, sequences=chosen.sequences)
        return packed_attention(q, k, v, own, heads, drop, memory=ctx.sequences, scale=self.head_dim**-0.5)


def _all_tokens(rows: list[Tensor], split: Any, head_dim: int) -> list[Tensor]:
    """(T / size, heads * head_dim) of each rank -> (T, heads / size * head_dim).

    Raises:
        ValueError: the ranks cannot have the same number of heads.
    """
    heads = rows[0].shape[1] // head_dim
    if heads % split.size:
        raise ValueError(
            f"cp_size: got {split.size} with {heads} attention heads on a rank and global tokens; ranks that share the "
            "tokens of texts with global tokens share out the heads, so use a divisor of their number"
        )
    return [x.contiguous() for x in split.to_heads(torch.stack(rows, 1)).unbind(1)]


@eager
def _windows_and_far(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Packed,
    chosen: GlobalTokens,
    sizes: tuple[int, float, int],
    drop: AttentionDropout,
    far_drop: AttentionDropout,
) -> Tensor:
    """Attention of each token to its window and to global tokens, some of which are outside of windows.

    sizes: heads, scale, window.
    """
    heads, scale, window = sizes
    if attention.serves(q, k, v) and round(drop.p * 65536) < 65536:
        shape = attention.Heads(heads, heads, scale, window=window)
        q, k, v = (x.contiguous() for x in (q, k, v))
        return _WindowsAndFar.apply(q, k, v, ctx.sequences.cu_seqlens, chosen.far(window), shape, drop, far_drop)
    return _in_blocks(q, k, v, ctx, chosen, sizes, drop, far_drop)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(rows, heads * head_dim) -> (heads, rows, head_dim)."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1)


def _in_rows(x: Tensor) -> Tensor:
    """(heads, rows, head_dim) -> (rows, heads * head_dim)."""
    return x.transpose(0, 1).flatten(1)


class _WindowsAndFar(Function):
    """The compiled operator for windows, and torch for global tokens outside. q, k, v, out: (T, heads * head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        far: list[FarSequence],
        shape: attention.Heads,
        drop: AttentionDropout,
        far_drop: AttentionDropout,
    ) -> Tensor:
        p, key, site, tokens, first_head = drop.rule()
        numbers = *shape.numbers(), key, site, first_head, round(p * 65536)
        inputs = q, k, v, cu_seqlens, cu_seqlens, None, None if tokens is None else tokens.contiguous()
        out, sums = attention.run(*inputs, *numbers)
        far_key = far_drop.key if far_drop.p else 0
        ctx.far, ctx.shape, ctx.numbers, ctx.far_drop, ctx.far_key = far, shape, numbers, far_drop, far_key
        for low, high, sequence in _far_blocks(far):
            scores = _far_scores(q, k, low, high, sequence, shape)
            most, total = sums[low:high].permute(2, 1, 0)
            top = torch.maximum(most, scores.amax(-1))
            weights = scores.sub_(top[..., None]).exp_()
            share = total * (most - top).exp()
            whole = share + weights.sum(-1)
            values = _by_head(v[sequence.tokens], shape.heads)
            mixed = _dropped(weights, low, high, q.shape[0], far_drop, far_key) @ values
            mixed.addcmul_(_by_head(out[low:high], shape.heads), share[..., None]).div_(whole[..., None])
            out[low:high] = _in_rows(mixed)
            sums[low:high] = torch.stack((top, whole), -1).transpose(0, 1)
        ctx.save_for_backward(out, sums, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        out, sums, q, k, v, *_ = ctx.saved_tensors
        # Weights follow from the saved sums, so these gradients are those of the common softmax.
        dq, dk, dv, _ = attention.run_backward(grad, False, *ctx.saved_tensors, *ctx.numbers)
        shape: attention.Heads = ctx.shape
        for low, high, sequence in _far_blocks(ctx.far):
            tokens = sequence.tokens
            top, whole = sums[low:high].permute(2, 1, 0)
            weights = _far_scores(q, k, low, high, sequence, shape).sub_(top[..., None]).exp_().div_(whole[..., None])
            of_out, mixed, queries = (_by_head(x[low:high], shape.heads) for x in (grad, out, q))
            keys, values = (_by_head(x[tokens], shape.heads) for x in (k, v))
            dropped, dweights = (
                _dropped(x, low, high, q.shape[0], ctx.far_drop, ctx.far_key)
                for x in (weights, of_out @ values.transpose(1, 2))
            )
            dv.index_add_(0, tokens, _in_rows(dropped.transpose(1, 2) @ of_out))
            delta = (of_out * mixed).sum(-1, keepdim=True)
            dscores = (dweights - delta).mul_(weights).mul_(shape.scale)
            dq[low:high] += _in_rows(dscores @ keys)
            dk.index_add_(0, tokens, _in_rows(dscores.transpose(1, 2) @ queries))
        return dq, dk, dv, *(None,) * 5


def _far_blocks(far: list[FarSequence]) -> Iterator[tuple[int, int, FarSequence]]:
    """Blocks of queries, from `low` to `high` - 1, with their sequences."""
    for sequence in far:
        for low, high in sequence.blocks(max(1, _FAR_SCORES // sequence.tokens.numel())):
            yield low, high, sequence


def _far_scores(q: Tensor, k: Tensor, low: int, high: int, sequence: FarSequence, shape: attention.Heads) -> Tensor:
    """(heads, high - low, g) scores of global tokens, -inf for those in the window."""
    assert shape.window is not None
    queries, keys = (_by_head(x, shape.heads) for x in (q[low:high], k[sequence.tokens]))
    scores = (queries @ keys.transpose(1, 2)).mul_(shape.scale)
    return scores.masked_fill_(sequence.inside(low, high, shape.window), -torch.inf)


def _dropped(weights: Tensor, low: int, high: int, total: int, drop: AttentionDropout, key: int) -> Tensor:
    """Weights (heads, high - low, keys) of the tokens from `low` on, with dropout. total: number of all tokens."""
    if not drop.p:
        return weights
    return drop.drop(weights, key, drop.numbers(total, slice(low, high), 1, weights.shape[0]))


def _in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Packed,
    chosen: GlobalTokens,
    sizes: tuple[int, float, int],
    drop: AttentionDropout,
    far_drop: AttentionDropout,
) -> Tensor:
    """As `_windows_and_far`, in torch: sequences without far tokens by packed_attention, the others in blocks of
    queries."""
    heads, scale, window = sizes
    near, sequences = chosen.near(window)
    mixed = torch.zeros_like(q)
    if near.numel():
        numbers = drop.queries
        own = drop if numbers is None else replace(drop, tokens=numbers.index_select(0, near))
        of_near = replace(ctx, sequences=sequences)
        near_q, near_k, near_v = (x.index_select(0, near) for x in (q, k, v))
        found = packed_attention(near_q, near_k, near_v, of_near, heads, own, mask=Mask(window=window), scale=scale)
        mixed = mixed.index_copy(0, near, found)
    keys = (drop.key, far_drop.key) if drop.p else (0, 0)
    for sequence in chosen.far(window):
        far_k, far_v = (_by_head(x.index_select(0, sequence.tokens), heads) for x in (k, v))
        rows = []
        for low, high in sequence.blocks(max(_LEAST_BLOCK, window - 1)):
            first, last = max(sequence.start, low - window + 1), min(sequence.stop, high + window - 1)
            queries, of_k, of_v = (_by_head(x, heads) for x in (q[low:high], k[first:last], v[first:last]))
            inside = torch.ones(high - low, last - first, dtype=torch.bool, device=q.device)
            inside = inside.tril(low - first + window - 1).triu(low - first - window + 1)
            hidden = torch.cat([~inside, sequence.inside(low, high, window)], 1)
            scores = queries @ torch.cat([of_k, far_k], 1).transpose(1, 2) * scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(
                -1, dtype=torch.promote_types(q.dtype, torch.float32)
            )
            parts = weights.to(v.dtype).split([last - first, far_k.shape[1]], -1)
            of_window, of_far = (
                _dropped(x, low, high, q.shape[0], y, key)
                for x, y, key in zip(parts, (drop, far_drop), keys, strict=True)
            )
            rows.append(_in_rows(of_window @ of_v + of_far @ far_v))
        places = torch.arange(sequence.start, sequence.stop, device=q.device)
        mixed = mixed.index_copy(0, places, torch.cat(rows))
    return mixed
