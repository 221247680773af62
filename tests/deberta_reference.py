"""DeBERTa-v3's discriminator, of which transformers has only the body; and ways to spoil a DeBERTa."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DebertaV2Config, DebertaV2ForMaskedLM

from modelcenter.layers.disentangled import DistanceStates

# transformers 5.17 ties layers of the newer head that it does not have, and so loads none.
LOADS_NEW_HEAD = not DebertaV2ForMaskedLM(
    DebertaV2Config(
        **dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads"), 8), legacy=False, num_hidden_layers=1
    )
)._tied_weights_keys

# What every DeBERTa of the parity tests has.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 66,
    "max_relative_positions": -1,
    "relative_attention": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-2,
    "pad_token_id": 1,
}

Spoil = Callable[[nn.Module], None]


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


def spoil_places(change: Callable[[Tensor], Tensor]) -> Spoil:
    """Change which distance a row of the table is for."""

    def spoil(model: nn.Module) -> None:
        distances = model.distances
        found = distances.forward
        distances.forward = lambda *args: DistanceStates((states := found(*args)).states, change(states.places))

    return spoil


def without_kind(kind: str) -> Spoil:
    """Leave out one of the products of scores."""

    def spoil(model: nn.Module) -> None:
        for layer in model.layers:
            layer.attn.kinds = tuple(other for other in layer.attn.kinds if other != kind)

    return spoil


PLACES = {
    "query and key exchanged": spoil_places(lambda places: places.flip(0)),
    "one place off": spoil_places(lambda places: places.roll(1)),
}
