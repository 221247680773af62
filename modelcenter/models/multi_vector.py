"""Task "multi-vector": computing one vector per token (multi_vector_settings.MultiVectorSettings)."""

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from modelcenter.config import ModelConfig
from modelcenter.layers.heads import DenseLayers
from modelcenter.layers.packing import Packed
from modelcenter.models.outputs import ModelOutput


class MultiVectorMixin(nn.Module):
    """The part of models.base.Model that makes a vector of each token. The head is made by `make_token_head`."""

    config: ModelConfig
    head: Any

    if TYPE_CHECKING:  # EmbeddingMixin has it

        @property
        def state_width(self) -> int: ...

    @property
    def vector_width(self) -> int:
        """The width of a token's vector."""
        dense = self.config.multi_vector.dense
        return dense[-1].width if dense else self.state_width

    def make_token_head(self) -> nn.Module | None:
        """The layers that make a vector of a hidden state; None: there are none."""
        layers = self.config.multi_vector.dense_by_number
        return DenseLayers(self.state_width, layers) if layers else None

    def token_vectors(self, x: Tensor, ctx: Packed) -> ModelOutput:
        """The output `token_embeddings`, (batch, seq, vector_width), or (1, T, vector_width) of packed input, from the
        final hidden states x (T, state_width)."""
        if self.config.multi_vector.dense:
            x = self.head(x)
        return ModelOutput(
            token_embeddings=ctx.repad(F.normalize(x, dim=-1) if self.config.multi_vector.normalize else x)
        )
