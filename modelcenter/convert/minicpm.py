"""Checkpoints of MiniCPM-1B, 2B, MiniCPM4 (`minicpm`, code published with the weights) and MiniCPM3 (transformers').

Tensors have Llama's names. Files of 1B and 2B hold no lm_head, and their config.json does not say that it is tied: this
is the default. `auto_map` names the code to load them with, and is written back.
"""

from dataclasses import replace

from modelcenter.convert.llama import BIASES, BODY, HEAD_DIM, llama_arch
from modelcenter.convert.rules import ArchMap, Rename

TASKS = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification")
SCALES = {name: name for name in ("scale_emb", "scale_depth", "dim_model_base")}
LATENT = {
    name: name for name in "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim".split()
}
# mup_denominator: for learning rates.
IGNORED = frozenset({"auto_map", "mup_denominator"})


def _scaled(model_type: str, name: str, fields: dict[str, str]) -> ArchMap:
    arch = llama_arch(model_type, name, SCALES | fields)
    return replace(
        arch,
        tasks={task: arch.tasks[task] for task in TASKS},
        config=replace(arch.config, ignored=arch.config.ignored | IGNORED),
    )


ARCH = _scaled("minicpm", "MiniCPM", {"attention_bias": "attention_bias", "sparse_config": "sparse_config"})

MINICPM3 = replace(
    _scaled("minicpm3", "MiniCPM3", BIASES | LATENT | HEAD_DIM),
    body=(
        *(rule for rule in BODY if "self_attn" not in rule.hub_templates()[0]),
        Rename("layers.{i}.self_attn.q_proj.weight", "layers.{i}.attn.q.weight"),
        Rename("layers.{i}.self_attn.q_a_proj.*", "layers.{i}.attn.q_down.*"),
        Rename("layers.{i}.self_attn.q_a_layernorm.weight", "layers.{i}.attn.q_norm.weight"),
        Rename("layers.{i}.self_attn.q_b_proj.weight", "layers.{i}.attn.q_up.weight"),
        Rename("layers.{i}.self_attn.kv_a_proj_with_mqa.*", "layers.{i}.attn.kv_down.*"),
        Rename("layers.{i}.self_attn.kv_a_layernorm.weight", "layers.{i}.attn.kv_norm.weight"),
        Rename("layers.{i}.self_attn.kv_b_proj.weight", "layers.{i}.attn.kv_up.weight"),
        Rename("layers.{i}.self_attn.o_proj.*", "layers.{i}.attn.out.*"),
    ),
)
