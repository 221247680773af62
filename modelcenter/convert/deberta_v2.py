"""DeBERTa's checkpoints: rules and config of transformers' `deberta-v2` models, including v3 and mDeBERTa.

The vocabulary's head has two spellings with the same arithmetic: `cls.predictions` and, with `legacy` off,
`lm_predictions.lm_head`. Published v3 files have the second, but their configs do not say so, and transformers
initialises a new head. Both are read; `legacy` decides which is written. `mask_predictions` is the head that detected
replaced tokens when v3 was trained; no class of transformers has it, so it is left out.
"""

import re
from collections.abc import Mapping
from typing import Any

from modelcenter.convert import bert
from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Task, Tied, untied, with_embedding


def _has_positions(config: Any) -> bool:
    return bool(config.position_input)


_POSITIONS = "embeddings.position_embeddings.weight"
_SELF = "encoder.layer.{i}.attention.self"
BODY: tuple[Rule, ...] = (
    *(rule for rule in bert.BODY if not any(".self." in name or "position" in name for name in rule.hub_templates())),
    Rename(_POSITIONS, "position.weight", when=_has_positions),
    Rename(f"{_SELF}.query_proj.*", "layers.{i}.attn.q.*"),
    Rename(f"{_SELF}.key_proj.*", "layers.{i}.attn.k.*"),
    Rename(f"{_SELF}.value_proj.*", "layers.{i}.attn.v.*"),
    Rename(f"{_SELF}.pos_query_proj.*", "layers.{i}.attn.distance_q.*"),
    Rename(f"{_SELF}.pos_key_proj.*", "layers.{i}.attn.distance_k.*"),
    Rename("encoder.rel_embeddings.weight", "distances.weight"),
    Rename("encoder.LayerNorm.*", "distances.norm.*"),
    Rename("encoder.conv.conv.*", "layers.0.conv.*"),
    Rename("encoder.conv.LayerNorm.*", "layers.0.conv_norm.*"),
)

_OLD, _NEW = "cls.predictions", "lm_predictions.lm_head"
_WORDS = "embeddings.word_embeddings.weight"


def _legacy(config: Any) -> bool:
    return bool(config.legacy)


def _not_legacy(config: Any) -> bool:
    return not config.legacy


def _tied_legacy(config: Any) -> bool:
    return config.legacy and config.tie_embeddings


def _head(dense: str, norm: str, other_dense: str, other_norm: str, when: Any) -> tuple[Rule, ...]:
    return (
        Rename(f"{dense}.*", "dense.*", when=when, aliases=(f"{other_dense}.*",)),
        Rename(f"{norm}.*", "norm.*", when=when, aliases=(f"{other_norm}.*",)),
    )


_OLD_LAYERS = f"{_OLD}.transform.dense", f"{_OLD}.transform.LayerNorm"
_NEW_LAYERS = f"{_NEW}.dense", f"{_NEW}.LayerNorm"
PARTS = {
    "lm": Part(
        (
            *_head(*_OLD_LAYERS, *_NEW_LAYERS, _legacy),
            *_head(*_NEW_LAYERS, *_OLD_LAYERS, _not_legacy),
            Rename(f"{_OLD}.bias", "bias", when=_tied_legacy, aliases=(f"{_NEW}.bias",)),
            Rename(f"{_NEW}.bias", "bias", when=_not_legacy, aliases=(f"{_OLD}.bias",)),
            Tied(f"{_OLD}.decoder.weight", to=_WORDS, when=_tied_legacy),
            Tied(f"{_OLD}.decoder.bias", to=f"{_OLD}.bias", when=_tied_legacy),
            Rename(f"{_OLD}.decoder.weight", "weight", when=untied),
            Rename(f"{_OLD}.decoder.bias", "bias", when=untied),
            Tied(f"{_OLD}.bias", to=f"{_OLD}.decoder.bias", compare=False, write=True, when=untied),
        )
    ),
    "classifier": Part((Rename("pooler.dense.*", "dense.*"), Rename("classifier.*", "*"))),
    "token classifier": Part((Rename("classifier.*", "*"),)),
    "choice": Part((Rename("pooler.dense.*", "dense.*"), Rename("classifier.*", "*"))),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
    "replaced": Part(
        (
            Rename("mask_predictions.dense.*", "dense.*"),
            Rename("mask_predictions.LayerNorm.*", "norm.*"),
            Rename("mask_predictions.classifier.*", "*"),
        )
    ),
}

TASKS = {
    "base": Task("DebertaV2Model", prefix=""),
    "masked-lm": Task("DebertaV2ForMaskedLM", {"lm": "head."}),
    "sequence-classification": Task("DebertaV2ForSequenceClassification", {"classifier": "head."}),
    "token-classification": Task("DebertaV2ForTokenClassification", {"token classifier": "head."}),
    "question-answering": Task("DebertaV2ForQuestionAnswering", {"qa": "head."}, labels=2),
    "multiple-choice": Task("DebertaV2ForMultipleChoice", {"choice": "head."}),
    # In its authors' code; not in transformers.
    "pretraining": Task("ReplacedTokenDetectionModel", {"replaced": "head."}, loaded_by="DebertaV2Model"),
}

_KINDS, _NORMS = "pos_att_type", "norm_rel_ebd"


class _Fields:
    """Handles lists written as "p2c|c2p", numbers where -1 means none, and sizes that follow from others."""

    handles = frozenset({"attention_head_size", "embedding_size", "pooler_hidden_size"})

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """
        Raises:
            ValueError: a size is possible only in Microsoft's own code, or a norm is unknown.
        """
        values = dict(values)
        width, heads = values.get("hidden_size"), values.get("num_attention_heads")
        per_head = width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None
        usual = {"embedding_size": width, "pooler_hidden_size": width, "attention_head_size": per_head}
        for name, expected in usual.items():
            given = values.pop(name, None)
            if given is not None and expected is not None and given != expected:
                said = f"config field {name!r} is {given!r}, but this model implements {expected} (by hidden_size)"
                raise ValueError(said)
        if isinstance(kinds := values.get(_KINDS), str):
            values[_KINDS] = [kind.strip() for kind in kinds.lower().split("|") if kind.strip()]
        norms = values.pop(_NORMS, None)
        if norms is not None:
            if norms not in ("layer_norm", "none"):
                raise ValueError(f"config field {_NORMS!r} is {norms!r}, expected 'layer_norm' or 'none'")
            values[_NORMS] = norms == "layer_norm"
        for name in ("max_relative_positions", "position_buckets"):
            if isinstance(number := values.get(name), int) and number < 1:
                values[name] = None
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """In the form that transformers and the published files use."""
        values = dict(values)
        values[_NORMS] = "layer_norm" if values[_NORMS] else "none"
        for name in ("max_relative_positions", "position_buckets"):
            if values[name] is None:
                values[name] = -1
        return values | {"pooler_hidden_size": values["hidden_size"]}


CONFIG = ConfigMap(
    fields={
        **bert.FIELDS,
        "cls_dropout": "classifier_dropout",
        "pooler_dropout": "pooler_dropout",
        "pooler_hidden_act": "pooler_act",
        "position_biased_input": "position_input",
        "relative_attention": "relative_attention",
        _KINDS: "relative_kinds",
        "max_relative_positions": "max_distance",
        "position_buckets": "position_buckets",
        _NORMS: "norm_distances",
        "share_att_key": "share_projections",
        "conv_kernel_size": "conv_width",
        "conv_act": "conv_act",
        "legacy": "legacy",
    },
    required={"conv_groups": (1,)},
    translation=_Fields(),
)

ARCH = ArchMap(
    model_type="deberta-v2",
    prefix="deberta.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    # Some files hold a position table that their config turns off.
    ignore=(*bert.IGNORE, re.escape(_POSITIONS)),
)
