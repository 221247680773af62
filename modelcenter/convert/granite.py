"""Checkpoints of Granite: rules and config of transformers' `granite`. Tensors have Llama's names."""

from dataclasses import replace

from modelcenter.convert.llama import BIASES, HEAD_DIM, ROPE, Qwen2Fields, llama_arch

FACTORS = {
    name: name for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
}
_TASKS = ("base", "embedding", "multi-vector", "causal-lm")

_ARCH = llama_arch("granite", "Granite", HEAD_DIM | BIASES | FACTORS, translation=Qwen2Fields(ROPE.names))
ARCH = replace(_ARCH, tasks={name: task for name, task in _ARCH.tasks.items() if name in _TASKS})
