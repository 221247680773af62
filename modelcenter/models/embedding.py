"""Task "embedding": computing one vector per sequence (embedding_settings.EmbeddingSettings)."""

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
    """The part of models.base.Model that pools. The head of the task is made by `make_embedding_head`."""

    # The default if the config has none.
    usual_pooling: str = "mean"
    config: ModelConfig
    head: Any

    @property
    def pooling(self) -> str:
        """The pooling of the hidden states of a text, one of embedding_settings.POOLINGS or several."""
        return self.config.embedding.pooling or self.usual_pooling

    @property
    def state_width(self) -> int:
        """The width of final hidden states."""
        return self.config.hidden_size

    @property
    def embedding_width(self) -> int:
        """The width of embeddings."""
        dense = self.config.embedding.dense
        return dense[-1].width if dense else self.pooled_width

    @property
    def _poolings(self) -> tuple[str, ...]:
        return tuple(self.pooling.split("+"))

    @property
    def pooled_width(self) -> int:
        """The width of pooled vectors."""
        return len(self._poolings) * self.state_width

    def make_embedding_head(self) -> nn.Module | None:
        """The dense layers after the pooling; None: there are none."""
        layers = self.config.embedding.dense_by_number
        return DenseLayers(self.pooled_width, layers) if layers else None

    def pooled_tokens(self, ctx: Packed, batch: Batch) -> Tensor | None:
        """(n,) index of the only pooled token of each sequence; None: several tokens are pooled."""
        return Pooling(ctx, batch.get("prompt_lengths")).tokens(self.pooling)

    def embeddings(self, x: Tensor, ctx: Packed, batch: Batch) -> Tensor:
        """(n, embedding_width): one vector per sequence, from the final hidden states x (T, state_width).

        Raises:
            ValueError: a sequence has no token, or none after its prompt.
        """
        pooling = Pooling(ctx, batch.get("prompt_lengths"))
        parts = [pooling.by(name, x) for name in self._poolings]
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.config.embedding.dense:
            pooled = self.head(pooled)
        return F.normalize(pooled, dim=-1) if self.config.embedding.normalizes else pooled
