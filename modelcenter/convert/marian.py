"""Marian's checkpoints: rules and config of transformers' `marian` models. Tensors have BART's names, without a norm of
the embeddings; files from before transformers 5, and those of a bare model, hold the sinusoidal positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert.bart import FIELDS, IGNORED, PARTS, SAME, SHARED, SIDES, ForcedTokensConfigMap, layers
from modelcenter.convert.rules import ArchMap, Task

TASKS = {
    "base": Task("MarianModel", prefix=""),
    "seq2seq-lm": Task("MarianMTModel", {"lm": "head."}),
}


@dataclass(frozen=True)
class MarianConfigMap(ForcedTokensConfigMap):
    """Marian's config.json, which repeats the size of the vocabulary."""

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        given = dict(values)
        target = given.pop("decoder_vocab_size", None)
        if target not in (None, size := given.get("vocab_size")):
            raise ValueError(
                f"config field 'decoder_vocab_size': got {target}, but this marian implements vocab_size ({size}): "
                "a single vocabulary for both sides"
            )
        return super().read(given, config_class, overrides)

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        out = super().write(config, hf_class, dtype)
        return dict(sorted({**out, "decoder_vocab_size": config.vocab_size}.items()))


CONFIG = MarianConfigMap(
    fields=FIELDS,
    required={
        **SAME,
        "share_encoder_decoder_embeddings": (True,),
        # From when one class implemented BART, mBART and Marian.
        "add_final_layer_norm": (False,),
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "static_position_embeddings": (True,),
    },
    ignored=IGNORED | {"classifier_dropout"},
    tokens={"eos_token_id": 0, "forced_eos_token_id": 0},
)

ARCH = ArchMap(
    model_type="marian",
    prefix="model.",
    body=(SHARED, *(rule for side in SIDES for rule in layers(side))),
    parts={"lm": PARTS["lm"]},
    tasks=TASKS,
    config=CONFIG,
    ignore=(r"(encoder|decoder)\.(version|embed_positions\.weight)",),
)
