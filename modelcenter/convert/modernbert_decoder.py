"""Checkpoints of ModernBERT's decoder: rules and config of transformers' `modernbert-decoder` models.

Unlike ModernBERT's, queries, keys and values are a tensor each, and what stands before the vocabulary's matrix has
another name than what stands before a classifier. Files say how many tokens a window holds in one of two ways or both:
twice that (`local_attention`), or that (`sliding_window`), by which transformers goes where it is there.
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
    """And both ways to write how much a window holds."""

    handles = modernbert.ModernBertFields.handles | {"sliding_window"}

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError as ModernBERT's, or for two windows that differ, of which transformers 5 takes
        `sliding_window`."""
        values = super().read(values)
        if (window := values.pop("sliding_window", None)) is None:
            return values
        if not isinstance(window, int):
            raise ValueError(f"config field 'sliding_window': got {window!r:.80}, expected a number of tokens")
        both = values.setdefault("local_attention", 2 * window)
        if isinstance(both, int) and both // 2 != window:
            raise ValueError(
                f"config field 'sliding_window' is {window}, and local_attention {both}, of which it is the half; make "
                "them agree"
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
    # Ettin's files say what an encoder's classifiers read, which a decoder's does not ask, and name tokens.
    config=ConfigMap(
        modernbert.FIELDS,
        required={"causal_mask": (True,), "is_causal": (True,)},
        ignored=modernbert.IGNORED | {"classifier_pooling", "bos_token", "eos_token", "unk_token"},
        translation=_Fields(),
    ),
)
