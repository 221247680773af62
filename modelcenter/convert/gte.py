"""GTE's checkpoints: rules and config of transformers' `gte` models, and of their authors' `new` models.

Files, including those that transformers writes, have the names of the authors' code: query, key and value are one
tensor, and so are the two halves of the gated feed-forward. In transformers' model they are separate, with the names
they have in its NomicBERT. The authors' models with a head have the prefix `new.`.

The authors' config.json names their code (`auto_map`), which cannot read the files written here: it is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert import nomic_bert
from modelcenter.convert.bert import FIELDS, OLD_SPELLINGS
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap
from modelcenter.convert.rope import RopeFields
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Split, Task, Tied, tied, untied, with_embedding

# The authors' name of `gte`.
AUTHORS = "new"

_LAYER = "encoder.layer.{i}"
BODY: tuple[Rule, ...] = (
    Rename("embeddings.word_embeddings.weight", "embed.weight"),
    Rename("embeddings.token_type_embeddings.weight", "token_type.weight"),
    Rename("embeddings.LayerNorm.*", "embed_norm.*"),
    Split(f"{_LAYER}.attention.qkv_proj.*", ("layers.{i}.attn.q.*", "layers.{i}.attn.k.*", "layers.{i}.attn.v.*")),
    Rename(f"{_LAYER}.attention.o_proj.*", "layers.{i}.attn.out.*"),
    Rename(f"{_LAYER}.attn_ln.*", "layers.{i}.attn_norm.*"),
    Split(f"{_LAYER}.mlp.up_gate_proj.*", ("layers.{i}.mlp.up.*", "layers.{i}.mlp.gate.*")),
    Rename(f"{_LAYER}.mlp.down_proj.*", "layers.{i}.mlp.down.*"),
    Rename(f"{_LAYER}.mlp_ln.*", "layers.{i}.mlp_norm.*"),
)

_NORM = "lm_head.layer_norm.*"
PARTS = {
    "pooler": Part((Rename("pooler.dense.*", "*"),), prefixed=True),
    "lm": Part(
        (
            Rename("lm_head.dense.*", "dense.*"),
            Rename("lm_head.norm.*", "norm.*", aliases=(_NORM,), in_model=_NORM),
            Tied("lm_head.decoder.weight", to="embeddings.word_embeddings.weight", when=tied),
            Rename("lm_head.decoder.weight", "weight", when=untied),
            Rename("lm_head.decoder.bias", "bias"),
        )
    ),
    # Two heads with the same name; `architectures` tells which one a file holds.
    "classifier": Part((Rename("classifier.*", "*"),)),
    "token classifier": Part((Rename("classifier.*", "*"),)),
}


def _task(name: str, parts: Mapping[str, str]) -> Task:
    return Task(f"Gte{name}", parts, class_aliases=(f"New{name}",))


TASKS = {
    "base": Task("GteModel", prefix="", class_aliases=("NewModel",)),
    "masked-lm": _task("ForMaskedLM", {"lm": "head."}),
    "sequence-classification": _task("ForSequenceClassification", {"pooler": "pooler.", "classifier": "head."}),
    "token-classification": _task("ForTokenClassification", {"token classifier": "head."}),
}


class _Fields(RopeFields):
    """Rotary fields; `auto_map` is left out."""

    @property
    def handles(self) -> frozenset[str]:
        return super().handles | {"auto_map"}

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = super().read(values)
        values.pop("auto_map", None)
        return values


@dataclass(frozen=True)
class GteConfigMap(ConfigMap):
    """The config.json of transformers and that of the authors."""

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """As ConfigMap.read.

        Raises:
            ValueError: as there; or a file of the authors omits rope_theta, or scales angles in an unsupported way.
        """
        given = dict(values)
        if given.get("model_type") == AUTHORS:
            given["model_type"] = config_class.model_type
        named = given.get("architectures")
        of_authors = isinstance(named, list) and any(str(name).startswith("New") for name in named)
        if of_authors and given.get("rope_theta") is None and not given.get("rope_parameters"):
            raise ValueError(
                "rope_theta: this config.json of the authors' code omits it, and their default differs from that of "
                "transformers' gte; write it into config.json"
            )
        return _without_ntk(super().read(given, config_class, overrides))


def _without_ntk(config: Any) -> Any:
    """The config with the authors' scaling "ntk" in transformers' terms: another base of the angles, all of which are
    slowed ("linear"). It is NTKScalingRotaryEmbedding in their code, and applies to texts of any length.

    Raises:
        ValueError: the factor is invalid, or grows from pair to pair (`mixed_b`).
    """
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") != "ntk":
        return config
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        raise ValueError(f"rope_scaling: rope_type 'ntk' needs a factor, a number above 0; got {scaling}")
    if more := {name: value for name, value in scaling.items() if name not in ("rope_type", "factor") and value}:
        raise ValueError(f"rope_scaling: got {more} with rope_type 'ntk', of which only factor is supported")
    if factor <= 1:  # their code leaves angles unchanged then
        return config.replace(rope_scaling=None)
    slowed = {"rope_type": "linear", "factor": factor ** (2 / config.head_dim)}
    return config.replace(rope_theta=config.rope_theta * factor, rope_scaling=slowed)


CONFIG = GteConfigMap(
    fields={
        **FIELDS,
        "rope_theta": "rope_theta",
        "rope_scaling": "rope_scaling",
        "classifier_dropout": "classifier_dropout",
    },
    # Options of the authors' code, for other networks.
    required={
        **BIDIRECTIONAL,
        "layer_norm_type": ("layer_norm",),
        "logn_attention_scale": (False,),
        "pack_qkv": (True,),
        "position_embedding_type": ("rope",),
    },
    # Performance options of the authors' code, and a field that it reads only with logn_attention_scale.
    ignored=frozenset("logn_attention_clip1 unpad_inputs use_memory_efficient_attention".split()),
    translation=_Fields({"rope_theta": "rope_theta"}),
)

ARCH = ArchMap(
    model_type="gte",
    prefix="gte.",
    body=BODY,
    body_in_model=nomic_bert.IN_MODEL,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=(r"embeddings\.position_ids", r"(.*\.)?rotary_emb\.((original_)?inv_freq|(cos|sin)_cached)"),
    old_spellings=((r"^new\.", "gte."), *OLD_SPELLINGS),
)
