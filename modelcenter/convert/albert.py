"""ALBERT's checkpoints: rules and config of transformers' `albert` models.

Files exist with and without the prefix `albert.`. They hold the layers of a group once, however often these run; our
layers are numbered across groups. Old files hold the buffer `position_ids` and repeat the word embedding and the bias
of the masked-LM head under `predictions.decoder`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelcenter.convert import bert
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap
from modelcenter.convert.pieces import Shape
from modelcenter.convert.rules import ArchMap, Config, Expansion, Part, Rename, Rule, Task, with_embedding


@dataclass(frozen=True)
class _OfLayer(Rename):
    """A tensor of our layer {i}, which is layer {inner} of group {group} in the file."""

    def expand(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Expansion:
        group, inner = divmod(int(values["i"]), config.group_layers)
        return super().expand(names, {**values, "group": str(group), "inner": str(inner)}, shapes, config)


def _of_layer(hub: str, native: str) -> Rule:
    return _OfLayer(
        f"encoder.albert_layer_groups.{{group}}.albert_layers.{{inner}}.{hub}.*", f"layers.{{i}}.{native}.*"
    )


BODY: tuple[Rule, ...] = (
    *(rule for rule in bert.BODY if rule.hub_templates()[0].startswith("embeddings.")),
    Rename("encoder.embedding_hidden_mapping_in.*", "project_in.*"),
    _of_layer("attention.query", "attn.q"),
    _of_layer("attention.key", "attn.k"),
    _of_layer("attention.value", "attn.v"),
    _of_layer("attention.dense", "attn.out"),
    _of_layer("attention.LayerNorm", "attn_norm"),
    _of_layer("ffn", "mlp.up"),
    _of_layer("ffn_output", "mlp.down"),
    _of_layer("full_layer_layer_norm", "mlp_norm"),
)

PARTS = {
    **{name: bert.PARTS[name] for name in ("classifier", "token classifier", "choice", "qa")},
    "pooler": Part((Rename("pooler.*", "*"),), prefixed=True),
    "lm": bert.masked_lm("predictions", "dense", "LayerNorm"),
    "sop": Part((Rename("sop_classifier.classifier.*", "*"),)),
}

TASKS = {
    "base": Task("AlbertModel", {"pooler": "pooler."}, prefix=""),
    "masked-lm": Task("AlbertForMaskedLM", {"lm": "head."}),
    "pretraining": Task("AlbertForPreTraining", {"pooler": "pooler.", "lm": "head.lm.", "sop": "head.sop."}, labels=2),
    "sequence-classification": Task("AlbertForSequenceClassification", {"pooler": "pooler.", "classifier": "head."}),
    "token-classification": Task("AlbertForTokenClassification", {"token classifier": "head."}),
    "question-answering": Task("AlbertForQuestionAnswering", {"qa": "head."}, labels=2),
    "multiple-choice": Task("AlbertForMultipleChoice", {"pooler": "pooler.", "choice": "head."}),
}

CONFIG = ConfigMap(
    fields={
        **bert.FIELDS,
        "embedding_size": "embedding_size",
        "num_hidden_groups": "num_groups",
        "inner_group_num": "group_layers",
        "classifier_dropout_prob": "classifier_dropout",
    },
    required={**BIDIRECTIONAL, "position_embedding_type": ("absolute",)},
    # In Google's code, but read by no version of transformers; and in BERT's first files.
    ignored=bert.CONFIG.ignored - {"embedding_size"}
    | frozenset("down_scale_factor gap_size net_structure_type num_memory_blocks".split()),
)

ARCH = ArchMap(
    model_type="albert",
    prefix="albert.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=bert.IGNORE,
    old_spellings=bert.OLD_SPELLINGS,
)
