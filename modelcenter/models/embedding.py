"""How a model of task "embedding" makes one vector of each sequence (embedding_settings.EmbeddingSettings)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelcenter.config import ModelConfig
from modelcenter.layers.heads import DenseLayers
from modelcenter.layers.packing import Packed
from modelcenter.layers.pooling import Pooling
from modelcenter.models.inputs import Batch


class EmbeddingMixin(nn.Module):
    """Base of models.base.Model: the pooling, and what follows it. The head is `make_embedding_head`'s."""

    # Where the config says none.
    usual_pooling: str = "mean"
    config: ModelConfig
    head: Any

    @property
    def pooling(self) -> str:
        """What is made of the hidden states of a text."""
        return self.config.embedding.pooling or self.usual_pooling

    @property
    def state_width(self) -> int:
        """Elements of a final hidden state."""
        return self.config.hidden_size

    @property
    def embedding_width(self) -> int:
        """Elements of an embedding."""
        dense = self.config.embedding.dense
        return dense[-1].width if dense else self.pooled_width

    @property
    def _poolings(self) -> tuple[str, ...]:
        return tuple(self.pooling.split("+"))

    @property
    def pooled_width(self) -> int:
        """Elements of what the pooling makes of a text."""
        return len(self._poolings) * self.state_width

    def make_embedding_head(self) -> nn.Module | None:
        """The dense layers behind the pooling; None: there are none."""
        layers = self.config.embedding.dense_by_number
        return DenseLayers(self.pooled_width, layers) if layers else None

    def pooled_tokens(self, ctx: Packed, batch: Batch) -> Tensor | None:
        """(n,) index of the token of each sequence that is all of its pooled vector; None: several tokens make it."""
        return Pooling(ctx, batch.get("prompt_lengths")).tokens(self.pooling)

    def embeddings(self, x: Tensor, ctx: Packed, batch: Batch) -> Tensor:
        """(n, embedding_width) one vector of each sequence, from the final hidden states x (T, state_width).

        Raises:
            ValueError: a sequence has no token, or none behind its prompt.
        """
        pooling = Pooling(ctx, batch.get("prompt_lengths"))
        parts = [pooling.by(name, x) for name in self._poolings]
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.config.embedding.dense:
            pooled = self.head(pooled)
        return F.normalize(pooled, dim=-1) if self.config.embedding.normalizes else pooled
