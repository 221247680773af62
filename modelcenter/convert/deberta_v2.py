"""DeBERTa-v2's checkpoints: rules and config of transformers' `deberta-v2` models, including v3 and mDeBERTa.

The files are those of the first DeBERTa (convert/deberta.py), with query, key and value apart. `mask_predictions` is
the head that detected replaced tokens when v3 was trained; no class of transformers has it, so it is left out there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelcenter.convert import deberta
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap
from modelcenter.convert.deberta import SELF
from modelcenter.convert.rules import Part, Rename, Rule, Task, with_embedding

BODY: tuple[Rule, ...] = (
    *deberta.SHARED_BODY,
    Rename(f"{SELF}.query_proj.*", "layers.{i}.attn.q.*"),
    Rename(f"{SELF}.key_proj.*", "layers.{i}.attn.k.*"),
    Rename(f"{SELF}.value_proj.*", "layers.{i}.attn.v.*"),
    Rename(f"{SELF}.pos_query_proj.*", "layers.{i}.attn.distance_q.*"),
    Rename(f"{SELF}.pos_key_proj.*", "layers.{i}.attn.distance_k.*"),
    Rename("encoder.LayerNorm.*", "distances.norm.*"),
    Rename("encoder.conv.conv.*", "layers.0.conv.*"),
    Rename("encoder.conv.LayerNorm.*", "layers.0.conv_norm.*"),
)

PARTS = {
    **deberta.PARTS,
    # A third head with a `classifier`.
    "choice": Part((Rename("pooler.dense.*", "dense.*"), Rename("classifier.*", "*"))),
    "replaced": Part(
        (
            Rename("mask_predictions.dense.*", "dense.*"),
            Rename("mask_predictions.LayerNorm.*", "norm.*"),
            Rename("mask_predictions.classifier.*", "*"),
        )
    ),
}

TASKS = {
    **{
        name: replace(task, hf_class=task.hf_class.replace("Deberta", "DebertaV2"))
        for name, task in deberta.TASKS.items()
    },
    "multiple-choice": Task("DebertaV2ForMultipleChoice", {"choice": "head."}),
    # In its authors' code; not in transformers.
    "pretraining": Task("ReplacedTokenDetectionModel", {"replaced": "head."}, loaded_by="DebertaV2Model"),
}

_KINDS, _NORMS = "pos_att_type", "norm_rel_ebd"


class _Fields(deberta.DebertaFields):
    """DeBERTa's, and the name of a norm."""

    optional_numbers = ("max_relative_positions", "position_buckets")

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """
        Raises:
            ValueError: a size is possible only in Microsoft's own code, or a norm is unknown.
        """
        values = super().read(values)
        if isinstance(kinds := values.get(_KINDS), list):
            # Here transformers asks only whether a kind is named; in the first DeBERTa, every name counts.
            values[_KINDS] = [kind for kind in kinds if kind]
        norms = values.pop(_NORMS, None)
        if norms is not None:
            if norms not in ("layer_norm", "none"):
                raise ValueError(f"config field {_NORMS!r} is {norms!r}, expected 'layer_norm' or 'none'")
            values[_NORMS] = norms == "layer_norm"
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """In the form that transformers and the published files use."""
        values = super().write(values)
        return values | {_NORMS: "layer_norm" if values[_NORMS] else "none"}


CONFIG = ConfigMap(
    fields={
        **deberta.FIELDS,
        "position_buckets": "position_buckets",
        _NORMS: "norm_distances",
        "share_att_key": "share_projections",
        "conv_kernel_size": "conv_width",
        "conv_act": "conv_act",
    },
    required={**BIDIRECTIONAL, "conv_groups": (1,)},
    translation=_Fields(),
)

ARCH = replace(
    deberta.ARCH,
    model_type="deberta-v2",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
)
