"""DeBERTa's checkpoints: rules and config of transformers' `deberta` models, and what `deberta-v2` has in common.

Query, key and value of a head are next to each other in one tensor, head after head, and only queries and values have
biases, in tensors of their own.

The vocabulary's head has two spellings with the same arithmetic: `cls.predictions` and, with `legacy` off,
`lm_predictions.lm_head`. Microsoft's files have the second, but their configs do not say so, and transformers
initialises a new head. Both are read; `legacy` decides which is written.
"""

import re
from collections.abc import Mapping
from typing import Any

from modelcenter.convert import bert
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Split, Task, Tied, untied, with_embedding


def _has_positions(config: Any) -> bool:
    return bool(config.position_input)


_POSITIONS = "embeddings.position_embeddings.weight"
SELF = "encoder.layer.{i}.attention.self"
# All but the projections in attention.
SHARED_BODY: tuple[Rule, ...] = (
    *(rule for rule in bert.BODY if not any(".self." in name or "position" in name for name in rule.hub_templates())),
    Rename(_POSITIONS, "position.weight", when=_has_positions),
    Rename("embeddings.embed_proj.weight", "project_in.weight"),
    Rename("encoder.rel_embeddings.weight", "distances.weight"),
)
BODY: tuple[Rule, ...] = (
    *SHARED_BODY,
    Split(
        f"{SELF}.in_proj.weight",
        ("layers.{i}.attn.q.weight", "layers.{i}.attn.k.weight", "layers.{i}.attn.v.weight"),
        groups=lambda config: config.num_heads,
    ),
    Rename(f"{SELF}.q_bias", "layers.{i}.attn.q.bias"),
    Rename(f"{SELF}.v_bias", "layers.{i}.attn.v.bias"),
    Rename(f"{SELF}.pos_proj.weight", "layers.{i}.attn.distance_k.weight"),
    Rename(f"{SELF}.pos_q_proj.*", "layers.{i}.attn.distance_q.*"),
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
    # Two heads with the same name; `architectures` tells which one a file holds.
    "classifier": Part((Rename("pooler.dense.*", "dense.*"), Rename("classifier.*", "*"))),
    "token classifier": Part((Rename("classifier.*", "*"),)),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}

TASKS = {
    "base": Task("DebertaModel", prefix=""),
    "masked-lm": Task("DebertaForMaskedLM", {"lm": "head."}),
    "sequence-classification": Task("DebertaForSequenceClassification", {"classifier": "head."}),
    "token-classification": Task("DebertaForTokenClassification", {"token classifier": "head."}),
    "question-answering": Task("DebertaForQuestionAnswering", {"qa": "head."}, labels=2),
}

_KINDS = "pos_att_type"


class DebertaFields:
    """Handles lists written as "p2c|c2p", numbers where -1 means none, and sizes that follow from others.

    optional_numbers: the fields with such numbers.
    """

    handles = frozenset({"attention_head_size", "pooler_hidden_size"})
    optional_numbers: tuple[str, ...] = ("max_relative_positions",)

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """
        Raises:
            ValueError: a size is possible only in Microsoft's own code.
        """
        values = dict(values)
        width, heads = values.get("hidden_size"), values.get("num_attention_heads")
        per_head = width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None
        for name, expected in {"pooler_hidden_size": width, "attention_head_size": per_head}.items():
            given = values.pop(name, None)
            if given is not None and expected is not None and given != expected:
                said = f"config field {name!r} is {given!r}, but this model implements {expected} (by hidden_size)"
                raise ValueError(said)
        if isinstance(kinds := values.get(_KINDS), str):
            values[_KINDS] = [kind.strip() for kind in kinds.lower().split("|")]
        for name in self.optional_numbers:
            if isinstance(number := values.get(name), int) and number < 1:
                values[name] = None
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """In the form that transformers and the published files use."""
        values = dict(values)
        for name in self.optional_numbers:
            if values[name] is None:
                values[name] = -1
        if values["embedding_size"] == values["hidden_size"]:
            del values["embedding_size"]
        return values | {"pooler_hidden_size": values["hidden_size"]}


# Also for DeBERTa-v2.
FIELDS = {
    **bert.FIELDS,
    "embedding_size": "embedding_size",
    "cls_dropout": "classifier_dropout",
    "pooler_dropout": "pooler_dropout",
    "pooler_hidden_act": "pooler_act",
    "position_biased_input": "position_input",
    "relative_attention": "relative_attention",
    _KINDS: "relative_kinds",
    "max_relative_positions": "max_distance",
    "legacy": "legacy",
}
CONFIG = ConfigMap(
    fields=FIELDS,
    # talking_head: matrices that mix the heads' scores and weights, which no published model has. The others are
    # DeBERTa-v2's, which transformers' first DeBERTa passes over.
    required={
        **BIDIRECTIONAL,
        "talking_head": (False,),
        "position_buckets": (-1, 0),
        "share_att_key": (False,),
        "norm_rel_ebd": ("none",),
        "conv_kernel_size": (0,),
    },
    translation=DebertaFields(),
)

# Some files hold a position table that their config turns off.
IGNORE = (*bert.IGNORE, re.escape(_POSITIONS))

ARCH = ArchMap(
    model_type="deberta",
    prefix="deberta.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=IGNORE,
)
