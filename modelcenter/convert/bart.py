"""BART's checkpoints: rules and config of transformers' `bart` models.

Files of models with a head have the body under `model.`. They also hold the buffer `final_logits_bias`, which is 0 in
every published file. Old files repeat the embedding on each side, and hold the unused numbers `encoder.version` and
`decoder.version`. If the vocabulary has a matrix of its own, transformers 5 does not tie the sides to `shared.weight`
either, so all three are written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert.config_map import BOTH_SIDES, ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Row, Rule, Task, Tied, tied, untied


def _attention(hub: str, native: str) -> list[Rule]:
    return [Rename(f"{hub}.{name}_proj.*", f"{native}.{name}.*") for name in ("q", "k", "v", "out")]


def layers(side: str, attention: list[Rule] | None = None) -> list[Rule]:
    """The word embeddings and layers of the encoder or the decoder, the same in BART and its derivatives.

    attention: rules of self-attention; None: BART's.
    """
    layer = f"{side}.layers.{{i}}"
    across = (
        [
            *_attention(f"{layer}.encoder_attn", f"{layer}.cross"),
            Rename(f"{layer}.encoder_attn_layer_norm.*", f"{layer}.cross_norm.*"),
        ]
        if side == "decoder"
        else []
    )
    words = f"{side}.embed_tokens.weight"
    return [
        Tied(words, to="shared.weight", when=tied),
        Tied(words, to="shared.weight", write=True, when=untied),
        *(_attention(f"{layer}.self_attn", f"{layer}.attn") if attention is None else attention),
        Rename(f"{layer}.self_attn_layer_norm.*", f"{layer}.attn_norm.*"),
        *across,
        Rename(f"{layer}.fc1.*", f"{layer}.mlp.up.*"),
        Rename(f"{layer}.fc2.*", f"{layer}.mlp.down.*"),
        Rename(f"{layer}.final_layer_norm.*", f"{layer}.mlp_norm.*"),
    ]


def embeddings(side: str) -> list[Rule]:
    """The position embeddings of a side, and the norm between its embeddings and its layers."""
    return [
        Rename(f"{side}.embed_positions.weight", f"{side}.position.weight"),
        Rename(f"{side}.layernorm_embedding.*", f"{side}.embed_norm.*"),
    ]


def final_norm(side: str) -> list[Rule]:
    """The norm after the layers of a side, which BART does not have."""
    return [Rename(f"{side}.layer_norm.*", f"{side}.final_norm.*")]


SHARED = Rename("shared.weight", "embed.weight")
SIDES = ("encoder", "decoder")

PARTS = {
    "lm": Part(
        (
            Tied("lm_head.weight", to="shared.weight", when=tied),
            Rename("lm_head.weight", "weight", when=untied),
            Row("final_logits_bias", "bias", optional=True),
        )
    ),
    "classifier": Part(
        (Rename("classification_head.dense.*", "dense.*"), Rename("classification_head.out_proj.*", "*"))
    ),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}

TASKS = {
    "base": Task("BartModel", prefix=""),
    "seq2seq-lm": Task("BartForConditionalGeneration", {"lm": "head."}),
    "sequence-classification": Task("BartForSequenceClassification", {"classifier": "head."}),
    "question-answering": Task("BartForQuestionAnswering", {"qa": "head."}, labels=2),
}

_FORCED = {"forced_bos_token_id": "bos_token_id", "forced_eos_token_id": "eos_token_id"}


@dataclass(frozen=True)
class BartStyleConfigMap(ConfigMap):
    """The config.json of BART and its derivatives."""

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        given = dict(values)
        if "encoder_layers" in given:
            given.pop("num_hidden_layers", None)  # in files next to encoder_layers, but never read
        return super().read(given, config_class, overrides)

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        return dict(sorted({**super().write(config, hf_class, dtype), "is_encoder_decoder": True}.items()))


@dataclass(frozen=True)
class ForcedTokensConfigMap(BartStyleConfigMap):
    """Adds the tokens with which a generated text must begin and end.

    tokens: transformers' defaults for these, and for the usual first and last tokens.
    """

    tokens: Mapping[str, int] = field(default_factory=dict)

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        given, changes = dict(values), dict(overrides or {})
        given["extra"] = extra = dict(given.get("extra") or {})
        held = {**self.tokens, **given, **extra}
        for forced, usual in _FORCED.items():
            if forced in held:
                extra[forced] = held[forced]
                given.pop(forced, None)
            as_usual = held.get(forced) is not None and held[forced] == held.get(usual)
            if usual in changes and forced not in changes and as_usual:
                changes[forced] = changes[usual]  # because the tokenizer differs
        return super().read(given, config_class, changes)

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        out = super().write(config, hf_class, dtype)
        out.setdefault("forced_eos_token_id", None)  # otherwise transformers would force a token
        return dict(sorted(out.items()))


@dataclass(frozen=True)
class BartConfigMap(ForcedTokensConfigMap):
    """BART's config.json, with an old field for the first token, and transformers' default for the number of labels.

    labels: number of labels if config.json has none.
    """

    tokens: Mapping[str, int] = field(
        default_factory=lambda: {"bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2}
    )
    labels: int = 3

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        given, extra = dict(values), dict(values.get("extra") or {})
        held = {**self.tokens, **given, **extra}
        if held.get("forced_bos_token_id") is None and held.get("force_bos_token_to_be_generated"):
            given["extra"] = {**extra, "forced_bos_token_id": held["bos_token_id"]}
        return super().read(given, config_class, overrides)

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        out = super().write(config, hf_class, dtype)
        if "id2label" not in out and self.labels != 2 and not hf_class.endswith("QuestionAnswering"):
            out |= {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
        return dict(sorted(out.items()))


# For BART and its derivatives.
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_attention_heads": "num_heads",
    "decoder_attention_heads": "num_decoder_heads",
    "encoder_ffn_dim": "intermediate_size",
    "decoder_ffn_dim": "decoder_intermediate_size",
    "activation_function": "hidden_act",
    "max_position_embeddings": "max_positions",
    "scale_embedding": "scale_embedding",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "pad_token_id": "pad_token_id",
    "eos_token_id": "eos_token_id",
    "decoder_start_token_id": "decoder_start_token_id",
    "init_std": "initializer_range",
}
SAME = {**BOTH_SIDES, "is_encoder_decoder": (True,), "encoder_layerdrop": (0.0,), "decoder_layerdrop": (0.0,)}
# Never read by transformers (add_bias_logits), or no longer; the size of the position table is a separate field.
IGNORED = frozenset(
    """add_bias_logits classif_dropout extra_pos_embeddings force_bos_token_to_be_generated kobart_version
    num_hidden_layers save_step""".split()
)

CONFIG = BartConfigMap(
    fields={**FIELDS, "classifier_dropout": "classifier_dropout"},
    required={
        **SAME,
        # From when one class implemented BART, mBART and Marian.
        "add_final_layer_norm": (False,),
        "do_blenderbot_90_layernorm": (False,),
        "normalize_before": (False,),
        "normalize_embedding": (True,),
        "static_position_embeddings": (False,),
    },
    ignored=IGNORED,
)

ARCH = ArchMap(
    model_type="bart",
    prefix="model.",
    body=(SHARED, *(rule for side in SIDES for rule in layers(side) + embeddings(side))),
    parts=PARTS,
    tasks=TASKS,
    config=CONFIG,
    ignore=(r"(encoder|decoder)\.version",),
)
