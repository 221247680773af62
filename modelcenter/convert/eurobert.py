"""EuroBERT's checkpoints: rules and config of transformers' `eurobert` models, whose body has Llama's names.

The published config.json names its authors' code (`auto_map`), whose tensors and arithmetic are those of transformers'
own class; `auto_map` is therefore not written. Some models that were fine-tuned with that code say `clf_pooling`
instead of `classifier_pooling`.
"""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert import llama
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap, set_once
from modelcenter.convert.rules import ArchMap, Part, Rename, Task, with_embedding

PARTS = {
    "lm": Part((*llama.PARTS["lm"].rules, Rename("lm_head.bias", "bias"))),
    # Two heads with the same name; `architectures` tells which one a file holds.
    "classifier": Part((Rename("dense.*", "dense.*"), Rename("classifier.*", "*"))),
    "token classifier": Part((Rename("classifier.*", "*"),)),
}

TASKS = {
    "base": Task("EuroBertModel", prefix=""),
    "masked-lm": Task("EuroBertForMaskedLM", {"lm": "head."}),
    "sequence-classification": Task("EuroBertForSequenceClassification", {"classifier": "head."}),
    "token-classification": Task("EuroBertForTokenClassification", {"token classifier": "head."}),
}


class _Fields(llama.LlamaFields):
    """Llama's fields, and the authors' name of the pooling."""

    @property
    def handles(self) -> frozenset[str]:
        return super().handles | {"auto_map", "clf_pooling"}

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = super().read(values)
        values.pop("auto_map", None)
        set_once(values, "classifier_pooling", values.pop("clf_pooling", None), "clf_pooling")
        return values


CONFIG = ConfigMap(
    fields={
        **{hub: ours for hub, ours in llama.FIELDS.items() if ours != "classifier_dropout"},
        **llama.HEAD_DIM,
        **llama.BIASES,
        "classifier_pooling": "pooling",
    },
    required={**BIDIRECTIONAL, "hidden_dropout": (0.0,)},
    # The texts of special tokens, which belong to the tokenizer; a setting of Meta's pretraining.
    ignored=frozenset("bos_token eos_token mask_token pad_token pretraining_tp".split()),
    translation=_Fields({"rope_theta": "rope_theta"}),
)

ARCH = ArchMap(
    model_type="eurobert",
    prefix="model.",
    body=llama.BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|original_inv_freq|(cos|sin)_cached)",),
)
