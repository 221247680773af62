"""LED's checkpoints: rules and config of transformers' `led` models. Tensors have BART's names, except those of the
encoder's self-attention. Files that transformers writes have a window for each layer, also where a config.json had one
for all.
"""

from dataclasses import dataclass, replace
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert import bart
from modelcenter.convert.bart import BartStyleConfigMap
from modelcenter.convert.rules import Rename, Rule, Task

TASKS = {
    "base": Task("LEDModel", prefix=""),
    "seq2seq-lm": Task("LEDForConditionalGeneration", {"lm": "head."}),
    "question-answering": Task("LEDForQuestionAnswering", {"qa": "head."}, labels=2),
}

_THEIRS, _OURS = "encoder.layers.{i}.self_attn", "encoder.layers.{i}.attn"
_ATTENTION: list[Rule] = [
    *(
        Rename(f"{_THEIRS}.longformer_self_attn.{name}{which}.*", f"{_OURS}.{name[0]}{which}.*")
        for name in ("query", "key", "value")
        for which in ("", "_global")
    ),
    Rename(f"{_THEIRS}.output.*", f"{_OURS}.out.*"),
]

# Ours: transformers keeps these fields, and ignores them.
_GLOBAL = ("global_first_token", "global_token_ids")


@dataclass(frozen=True)
class LedConfigMap(BartStyleConfigMap):
    """LED's config.json, with two fields of ours if they have a value."""

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        out = super().write(config, hf_class, dtype)
        return {name: value for name, value in out.items() if name not in _GLOBAL or value is not None}


CONFIG = LedConfigMap(
    fields={
        **{
            name: ours
            for name, ours in bart.FIELDS.items()
            if name not in ("max_position_embeddings", "scale_embedding")
        },
        "attention_window": "attention_window",
        "classifier_dropout": "classifier_dropout",
        "max_encoder_position_embeddings": "max_positions",
        "max_decoder_position_embeddings": "max_decoder_positions",
        **{name: name for name in _GLOBAL},
    },
    required=bart.CONFIG.required,
    # The last are of the authors' code. Transformers ignores the dilation, too.
    ignored=bart.IGNORED | {"attention_dilation", "attention_mode", "autoregressive"},
)

ARCH = replace(
    bart.ARCH,
    model_type="led",
    prefix="led.",
    body=(
        bart.SHARED,
        *bart.layers("encoder", _ATTENTION),
        *bart.embeddings("encoder"),
        *bart.layers("decoder"),
        *bart.embeddings("decoder"),
    ),
    parts={name: bart.PARTS[name] for name in ("lm", "qa")},
    tasks=TASKS,
    config=CONFIG,
)
