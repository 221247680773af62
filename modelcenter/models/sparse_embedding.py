"""Task "sparse-embedding": weights of the vocabulary's tokens, from a masked language model's logits
(sparse_settings.SparseEmbeddingSettings)."""

from typing import Any

from torch import Tensor, nn

from engine.loss import linear_term_weights
from modelcenter.config import ModelConfig
from modelcenter.layers.packing import Packed


class SparseEmbeddingMixin(nn.Module):
    """The part of models.encoder.Encoder that pools logits. The head is that of "masked-lm"."""

    config: ModelConfig
    embed: nn.Embedding
    head: Any

    def sparse_embeddings(self, x: Tensor, ctx: Packed) -> Tensor:
        """(n, vocab_size): the term weights of each sequence, from the final hidden states x (T, hidden_size).

        Raises:
            ValueError: a sequence has no token.
        """
        head, settings = self.head, self.config.sparse_embedding
        if ctx.num_sequences:
            ctx.first_tokens()  # raises
        # Under context parallelism, those of each sequence's tokens that are this rank's.
        own = (ctx.cu_seqlens[: ctx.num_sequences + 1].long() - ctx.first_own_token).clamp(0, ctx.num_tokens)
        found = linear_term_weights(
            head.transform(x),
            self.embed.weight if head.weight is None else head.weight,
            head.bias,
            own,
            pooling=settings.pooling,
            activation=settings.activation,
        )
        return ctx.greatest_over_ranks(found) if settings.pooling == "max" else ctx.sum_over_ranks(found)
