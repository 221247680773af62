"""CPM-Ant's checkpoints: rules and config of transformers' `cpmant` models.

Prompts stand below the words in one table of embeddings. The head has a matrix of its own in every file, although
`tie_word_embeddings` is on. The published config spells the class `CPMAntForCausalLM`.
"""

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Split, Task

LAYER = "encoder.layers.{i}."

BODY: tuple[Rule, ...] = (
    Rename("input_embedding.weight", "embed.weight"),
    Rename("segment_embedding.weight", "segment.weight"),
    Split("position_bias.relative_attention_bias", ("relative.weight", "relative.pairs")),
    Rename(LAYER + "self_att.layernorm_before_attention.weight", "layers.{i}.attn_norm.weight"),
    Rename(LAYER + "self_att.self_attention.project_q.weight", "layers.{i}.attn.q.weight"),
    Rename(LAYER + "self_att.self_attention.project_k.weight", "layers.{i}.attn.k.weight"),
    Rename(LAYER + "self_att.self_attention.project_v.weight", "layers.{i}.attn.v.weight"),
    Rename(LAYER + "self_att.self_attention.attention_out.weight", "layers.{i}.attn.out.weight"),
    Rename(LAYER + "ffn.layernorm_before_ffn.weight", "layers.{i}.mlp_norm.weight"),
    Rename(LAYER + "ffn.ffn.w_in.w_0.weight", "layers.{i}.mlp.gate.weight"),
    Rename(LAYER + "ffn.ffn.w_in.w_1.weight", "layers.{i}.mlp.up.weight"),
    Rename(LAYER + "ffn.ffn.w_out.weight", "layers.{i}.mlp.down.weight"),
    Rename("encoder.output_layernorm.weight", "final_norm.weight"),
)

CONFIG = ConfigMap(
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "dim_head": "head_dim",
        "dim_ff": "intermediate_size",
        "dropout_p": "dropout",
        "position_bias_num_buckets": "num_buckets",
        "position_bias_max_distance": "max_distance",
        "eps": "norm_eps",
        "init_std": "initializer_range",
        "prompt_types": "prompt_types",
        "prompt_length": "prompt_length",
        "segment_types": "segment_types",
    },
    ignored=frozenset({"pad_token_id"}),
)

ARCH = ArchMap(
    model_type="cpmant",
    prefix="cpmant.",
    body=BODY,
    parts={"lm": Part((Rename("lm_head.weight", "weight"),))},
    tasks={
        "base": Task("CpmAntModel", prefix=""),
        "causal-lm": Task("CpmAntForCausalLM", {"lm": "head."}, also=("CPMAntForCausalLM",)),
    },
    config=CONFIG,
)
