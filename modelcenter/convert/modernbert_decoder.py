"""Checkpoints of ModernBERT's decoder: rules and config of transformers' `modernbert-decoder` models.

Unlike ModernBERT's, queries, keys and values are separate tensors, and the layers before the vocabulary's matrix and
those before a classifier have different names. Files give the tokens in a window in one of two ways, or both: as twice
their number (`local_attention`), or as their number (`sliding_window`), which takes precedence in transformers.
"""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert import modernbert
from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Task, Tied, tied, untied, with_embedding

BODY: tuple[Rule, ...] = (
    *(rule for rule in modernbert.BODY if "Wqkv" not in rule.hub_templates()[0]),
    *(Rename(f"layers.{{i}}.attn.{name}_proj.*", f"layers.{{i}}.attn.{name}.*") for name in "qkv"),
)

PARTS = {
    "lm": Part(
        (
            Rename("lm_head.dense.*", "dense.*"),
            Rename("lm_head.norm.*", "norm.*"),
            Tied("decoder.weight", to="embeddings.tok_embeddings.weight", when=tied),
            Rename("decoder.weight", "weight", when=untied),
            Rename("decoder.bias", "bias"),
        )
    ),
    "classifier": Part(
        (
            Rename("head.dense.*", "transform.dense.*"),
            Rename("head.norm.*", "transform.norm.*"),
            Rename("classifier.*", "*"),
        )
    ),
}

TASKS = {
    "base": Task("ModernBertDecoderModel", prefix=""),
    "causal-lm": Task("ModernBertDecoderForCausalLM", {"lm": "head."}),
    "sequence-classification": Task("ModernBertDecoderForSequenceClassification", {"classifier": "head."}),
}


class _Fields(modernbert.ModernBertFields):
    """Adds both ways to write the size of a window."""

    handles = modernbert.ModernBertFields.handles | {"sliding_window"}

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError as ModernBERT's, or for two windows that differ, of which transformers 5 uses
        `sliding_window`."""
        values = super().read(values)
        if (window := values.pop("sliding_window", None)) is None:
            return values
        if not isinstance(window, int):
            raise ValueError(f"config field 'sliding_window': got {window!r:.80}, expected a number of tokens")
        both = values.setdefault("local_attention", 2 * window)
        if isinstance(both, int) and both // 2 != window:
            raise ValueError(
                f"config field 'sliding_window' is {window}, but local_attention is {both}, expected twice "
                "sliding_window"
            )
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = super().write(values)
        return values | {"sliding_window": values["local_attention"] // 2}


ARCH = ArchMap(
    model_type="modernbert-decoder",
    prefix="model.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    # Ettin's files have fields of an encoder's classifiers, which a decoder's do not read, and name tokens.
    config=ConfigMap(
        modernbert.FIELDS,
        required={"causal_mask": (True,)},
        ignored=modernbert.IGNORED | {"classifier_pooling", "bos_token", "eos_token", "unk_token"},
        translation=_Fields(),
    ),
)
