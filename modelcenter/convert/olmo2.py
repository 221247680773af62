"""Checkpoints of OLMo 2: rules and config of transformers' `olmo2`. Tensors have Llama's names, except that the norms
stand after what their names say; each of q and k has one norm for all heads."""

from modelcenter.convert import llama
from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.gemma import SANDWICH_BODY
from modelcenter.convert.rules import ArchMap, with_embedding

_TASKS = ("base", "causal-lm", "sequence-classification")

ARCH = ArchMap(
    model_type="olmo2",
    prefix="model.",
    body=SANDWICH_BODY,
    parts=llama.PARTS,
    tasks=with_embedding({name: task for name, task in llama.tasks("Olmo2").items() if name in _TASKS}),
    config=ConfigMap(
        {**llama.FIELDS, **llama.HEAD_DIM, "attention_bias": "attention_bias"},
        required=llama.REQUIRED,
        translation=llama.Qwen2Fields({"rope_theta": "rope_theta"}),
    ),
)
