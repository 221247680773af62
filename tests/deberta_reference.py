"""The discriminator of DeBERTa-v3's pretraining; transformers has only its body."""

from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class TheirDiscriminator(nn.Module):
    """DebertaV2Model with the head of its authors' code, in plain torch. Texts are padded on the right."""

    def __init__(self, body: nn.Module, act: str = "gelu"):
        super().__init__()
        width = body.config.hidden_size
        self.deberta, self.act = body, getattr(F, act)
        self.mask_predictions = nn.ModuleDict(
            {
                "dense": nn.Linear(width, width),
                "LayerNorm": nn.LayerNorm(width, body.config.layer_norm_eps),
                "classifier": nn.Linear(width, 1),
            }
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        states = self.deberta(input_ids, attention_mask=attention_mask).last_hidden_state
        parts = self.mask_predictions
        states = parts["LayerNorm"](states[:, :1] + states)
        return SimpleNamespace(logits=parts["classifier"](self.act(parts["dense"](states))).squeeze(-1))
