"""ESM's checkpoints: rules and config of transformers' `esm` models.

Every layer in published files holds the frequencies of its rotary angles. They are read, because those of ESM-2 differ
from the formula: they were rounded to fp16 in training. transformers 5 calls them `rotary_embeddings.inv_freq` but also
reads those of the layers; it writes them for a layer named `*`, and some norms with gamma and beta. Files of rotary
models may hold an unused position table, and old ones the buffer `position_ids`.
"""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert import bert
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap
from modelcenter.convert.rules import ArchMap, Config, Part, Rename, Rule, Task, Tied, tied, untied, with_embedding

_LAYER = "encoder.layer.{i}"
_FREQUENCIES = "encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq"
_OF_THE_MODEL, _OF_THE_FIRST = "rotary_embeddings.inv_freq", _FREQUENCIES.replace("{i}", "0")


def _rotary(config: Config) -> bool:
    return bool(config.position_type == "rotary")


BODY: tuple[Rule, ...] = (
    Rename("embeddings.word_embeddings.weight", "embed.weight"),
    Rename("embeddings.position_embeddings.weight", "position.weight"),
    Rename("embeddings.layer_norm.*", "embed_norm.*"),
    Rename(
        _OF_THE_FIRST,
        "rotary.frequencies",
        aliases=(_OF_THE_MODEL, _FREQUENCIES.replace("{i}", "*")),
        in_model=_OF_THE_MODEL,
        optional=True,
        buffer=True,
    ),
    Tied(_FREQUENCIES, to=_OF_THE_FIRST, write=True, when=_rotary),
    Rename(f"{_LAYER}.attention.LayerNorm.*", "layers.{i}.attn_norm.*"),
    Rename(f"{_LAYER}.attention.self.query.*", "layers.{i}.attn.q.*"),
    Rename(f"{_LAYER}.attention.self.key.*", "layers.{i}.attn.k.*"),
    Rename(f"{_LAYER}.attention.self.value.*", "layers.{i}.attn.v.*"),
    Rename(f"{_LAYER}.attention.output.dense.*", "layers.{i}.attn.out.*"),
    Rename(f"{_LAYER}.LayerNorm.*", "layers.{i}.mlp_norm.*"),
    Rename(f"{_LAYER}.intermediate.dense.*", "layers.{i}.mlp.up.*"),
    Rename(f"{_LAYER}.output.dense.*", "layers.{i}.mlp.down.*"),
    Rename("encoder.emb_layer_norm_after.*", "final_norm.*"),
    Rename("contact_head.regression.*", "contacts.*", optional=True),
)

PARTS = {
    "pooler": bert.PARTS["pooler"],
    "lm": Part(
        (
            Rename("lm_head.dense.*", "dense.*"),
            Rename("lm_head.layer_norm.*", "norm.*"),
            Rename("lm_head.bias", "bias"),
            Tied("lm_head.decoder.weight", to="embeddings.word_embeddings.weight", when=tied),
            Rename("lm_head.decoder.weight", "weight", when=untied),
        )
    ),
    # Two heads with the same name; `architectures` tells which one a file holds.
    "classifier": Part((Rename("classifier.dense.*", "dense.*"), Rename("classifier.out_proj.*", "*"))),
    "token classifier": Part((Rename("classifier.*", "*"),)),
}

TASKS = {
    "base": Task("EsmModel", {"pooler": "pooler."}, prefix=""),
    "masked-lm": Task("EsmForMaskedLM", {"lm": "head."}),
    "sequence-classification": Task("EsmForSequenceClassification", {"classifier": "head."}),
    "token-classification": Task("EsmForTokenClassification", {"token classifier": "head."}),
}


class _NoFolding:
    """Refuses ESMFold, of which the language model is only one component."""

    handles: frozenset[str] = frozenset()

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields, unchanged. Raises ValueError if they are ESMFold's."""
        if values.get("is_folding_model"):
            raise ValueError(
                "config field 'is_folding_model': got True (ESMFold, EsmForProteinFolding); only language models of "
                "proteins are supported, such as its own: facebook/esm2_t36_3B_UR50D"
            )
        return dict(values)

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(values)


CONFIG = ConfigMap(
    fields={
        **{hub: ours for hub, ours in bert.FIELDS.items() if ours != "type_vocab_size"},
        "position_embedding_type": "position_type",
        "rope_theta": "rope_theta",
        "emb_layer_norm_before": "norm_embeddings",
        "token_dropout": "token_dropout",
        "mask_token_id": "mask_token_id",
    },
    required=BIDIRECTIONAL,
    # Fields of ESMFold, and of BERT, from which the class was copied.
    ignored=frozenset(("classifier_dropout", "esmfold_config", "is_folding_model", "vocab_list")),
    translation=_NoFolding(),
)

ARCH = ArchMap(
    model_type="esm",
    prefix="esm.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=(r"embeddings\.position_(ids|embeddings\.weight)",),
    old_spellings=bert.OLD_SPELLINGS,
    layer_columns=("contact_head.regression.weight",),
)
