"""Longformer's checkpoints: rules and config of transformers' `longformer` models.

The body has RoBERTa's names, and three projections more in each layer. Files that transformers writes have a window for
each layer, also where a config.json had one for all.
"""

from dataclasses import replace

from modelcenter.convert import roberta
from modelcenter.convert.bert import BODY, FIELDS, IGNORE
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap
from modelcenter.convert.rules import CROSS_ATTENTION, Rename, with_embedding

_GLOBAL = tuple(
    Rename(f"encoder.layer.{{i}}.attention.self.{theirs}_global.*", f"layers.{{i}}.attn.{ours}_global.*")
    for theirs, ours in (("query", "q"), ("key", "k"), ("value", "v"))
)

CONFIG = ConfigMap(
    fields={**FIELDS, "attention_window": "attention_window", "sep_token_id": "sep_token_id"},
    required={**BIDIRECTIONAL, "position_embedding_type": ("absolute",)},
    # Of the authors' code and of an export to ONNX. Transformers ignores the dilation, too, which is 1 in all layers of
    # the published models.
    ignored=frozenset("attention_dilation attention_mode autoregressive ignore_attention_mask onnx_export".split()),
)

ARCH = replace(
    roberta.ARCH,
    model_type="longformer",
    prefix="longformer.",
    body=(*BODY, *_GLOBAL),
    parts={name: part for name, part in roberta.HEADS.items() if name != CROSS_ATTENTION},
    tasks=with_embedding({name: x for name, x in roberta.tasks("Longformer").items() if name != "causal-lm"}),
    config=CONFIG,
    ignore=IGNORE,
)
