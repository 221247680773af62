"""Multi-head attention layers over packed tokens."""

from collections.abc import Callable

from torch import Tensor, nn

from engine.ops import rotate
from modelcenter.layers.distances import Distances
from modelcenter.layers.dropout import NO_DROPOUT, AttentionDropout, DrawingModule
from modelcenter.layers.linear import Linear, each, first_output
from modelcenter.layers.mask import NO_MASK, Mask
from modelcenter.layers.packed_attention import packed_attention
from modelcenter.layers.packing import Packed


class MultiHeadAttention(DrawingModule):
    """What self- and cross-attention share: which heads are on this rank, and the dropout of attention weights."""

    head_dim: int
    dropout: float
    cap: float | None = None
    q: Linear

    @property
    def queries(self) -> nn.Module:
        """The projection to the queries of all heads, or, under tensor parallelism, of this rank's heads."""
        return self.q

    @property
    def first_head(self) -> int:
        """Index of the first head on this rank, under tensor parallelism."""
        return first_output(self.queries) // self.head_dim

    def weights_dropout(self, ctx: Packed) -> AttentionDropout:
        """The dropout of the attention weights in this forward."""
        if not self.training or self.dropout == 0.0:
            return NO_DROPOUT
        return AttentionDropout(self.dropout, ctx.draws, self, self.first_head)


class SelfAttention(MultiHeadAttention):
    """Multi-head self-attention. x: (T, hidden_size) -> the same, or (m, hidden_size) for `ctx.output_tokens`.

    Rotates queries and keys if the batch has rotary angles (`ctx.rotary`; with a window `ctx.local_rotary`, if it is
    set), adds the batch's relative position bias (`ctx.bias`), and reads and writes `ctx.cache` in generation.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        causal: bool = False,
        window: int | None = None,
        scale: float | None = None,
        interleaved: bool = False,
        head_norm: Callable[[int], nn.Module] | None = None,
        cap: float | None = None,
    ):
        """
        Args:
            num_kv_heads: number of key and value heads, each for num_heads / num_kv_heads query heads; None: num_heads.
            head_dim: None: hidden_size / num_heads. bias: whether q, k and v have biases. out_bias: whether the output
                projection has one; None: as `bias`.
            causal: a token sees only itself and earlier tokens. window: a token sees only those less than this many
                positions away.
            scale: factor of the scores; None: 1 / sqrt(head_dim). interleaved: rotary pairs are neighbours (GPT-J).
            head_norm: `head_norm(channels)` makes the norms that are applied to each head of q and k (Qwen3).
            cap: soft cap of the scaled scores s, which become cap tanh(s / cap) (Gemma 2); None: no cap.
        """
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, head_dim or hidden_size // num_heads, dropout
        self.causal, self.window, self.scale, self.interleaved = causal, window, scale, interleaved
        self.cap = cap
        self.num_kv_heads = num_kv_heads or num_heads
        inner, keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q = Linear(hidden_size, inner, bias)
        self.k = Linear(hidden_size, keys, bias)
        self.v = Linear(hidden_size, keys, bias)
        self.out = Linear(inner, hidden_size, bias if out_bias is None else out_bias)
        self.norms = head_norm is not None
        if head_norm is not None:
            self.q_norm, self.k_norm = head_norm(self.head_dim), head_norm(self.head_dim)

    def project(self, x: Tensor, ctx: Packed) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, heads * head_dim), k and v (T, kv_heads * head_dim); rotated."""
        q, k, v = each(x, self.q, self.k, self.v)
        if self.norms:
            q, k = self.normed(q, k)
        return *self.rotated(q, k, ctx), v

    def rotated(self, q: Tensor, k: Tensor, ctx: Packed) -> tuple[Tensor, Tensor]:
        """q and k turned by the angles of the batch, if it has any."""
        local = self.window is not None and ctx.local_rotary is not None
        if (angles := ctx.local_rotary if local else ctx.rotary) is not None:
            q, k = rotate(q, k, *angles, self.head_dim, self.interleaved)
        return q, k

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k with each head normalised."""
        q, k = q.unflatten(1, (-1, self.head_dim)), k.unflatten(1, (-1, self.head_dim))
        return self.q_norm(q).flatten(1), self.k_norm(k).flatten(1)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        return self.out(ctx.scaled(ctx.narrow(self.mix(*self.project(x, ctx), ctx))))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, ctx: Packed, distances: Distances | None = None) -> Tensor:
        """(T, heads * head_dim): the values that each head attends to, from what `project` returned."""
        mask = Mask(self.causal, self.window, ctx.bias, ctx.segments, ctx.segment_bias, ctx.rectangles)
        if not q.dtype == k.dtype == v.dtype:  # under autocast, rotation makes q and k fp32
            q, k = q.to(v.dtype), k.to(v.dtype)
        # Under tensor parallelism, q, k and v have only some of the heads.
        heads, kv_heads = q.shape[1] // self.head_dim, k.shape[1] // self.head_dim
        if ctx.bias is not None and heads != self.num_heads:
            mask = mask.of_heads(self.first_head, heads)
        if ctx.cache is not None and ctx.cache.extend(self, k, v, kv_heads, ctx):
            return ctx.cache.attend(self, q, heads, mask, self.scale, self.cap)
        drop = self.weights_dropout(ctx)
        return packed_attention(
            q, k, v, ctx, heads, drop,
            kv_heads=kv_heads, mask=mask, scale=self.scale, distances=distances, cap=self.cap,
        )  # fmt: skip


class CrossAttention(MultiHeadAttention):
    """Attention of a decoder's tokens to the encoder's, `ctx.memory`. x: (T, hidden_size) -> the same, or (m,
    hidden_size) for `ctx.output_tokens`."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        scale: float | None = None,
        cap: float | None = None,
        memory_size: int | None = None,
    ):
        """As in SelfAttention. memory_size: channels of the encoder's states; None: hidden_size."""
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, head_dim or hidden_size // num_heads, dropout
        self.scale, self.cap = scale, cap
        inner, keys = num_heads * self.head_dim, (num_kv_heads or num_heads) * self.head_dim
        self.q = Linear(hidden_size, inner, bias)
        self.k = Linear(memory_size or hidden_size, keys, bias)
        self.v = Linear(memory_size or hidden_size, keys, bias)
        self.out = Linear(inner, hidden_size, bias)

    def sees(self, ctx: Packed) -> bool:
        """Whether there are encoder tokens: in the batch, or as keys in the cache."""
        return ctx.memory is not None or (ctx.cache is not None and ctx.cache.has(self))

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        q = self.q(x)
        heads = q.shape[1] // self.head_dim
        if ctx.cache is not None and ctx.cache.has(self):
            return self.out(ctx.scaled(ctx.narrow(ctx.cache.attend(self, q, heads, NO_MASK, self.scale, self.cap))))
        assert ctx.memory is not None
        states, memory = ctx.memory
        k, v = each(states, self.k, self.v)
        kv_heads = k.shape[1] // self.head_dim
        if ctx.cache is not None:
            ctx.cache.remember(self, k, v, kv_heads, memory)
        mixed = packed_attention(
            q, k, v, ctx, heads, self.weights_dropout(ctx),
            kv_heads=kv_heads, memory=memory, scale=self.scale, cap=self.cap,
        )  # fmt: skip
        return self.out(ctx.scaled(ctx.narrow(mixed)))
