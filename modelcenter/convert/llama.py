"""Checkpoints of Llama, Qwen2, Qwen3 and Mistral: rules and config of transformers' models with these names.

Old files hold the buffers `rotary_emb.inv_freq`. Models for question answering have the prefix `transformer.` where
others have `model.` (except Mistral's). `lm_head.weight` is absent if it is the embedding; old files may repeat it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rope import RopeFields
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Task, Tied, tied, untied, with_embedding

BODY: tuple[Rule, ...] = (
    Rename("embed_tokens.weight", "embed.weight"),
    Rename("layers.{i}.input_layernorm.weight", "layers.{i}.attn_norm.weight"),
    Rename("layers.{i}.self_attn.q_proj.*", "layers.{i}.attn.q.*"),
    Rename("layers.{i}.self_attn.k_proj.*", "layers.{i}.attn.k.*"),
    Rename("layers.{i}.self_attn.v_proj.*", "layers.{i}.attn.v.*"),
    Rename("layers.{i}.self_attn.o_proj.*", "layers.{i}.attn.out.*"),
    Rename("layers.{i}.self_attn.q_norm.weight", "layers.{i}.attn.q_norm.weight"),
    Rename("layers.{i}.self_attn.k_norm.weight", "layers.{i}.attn.k_norm.weight"),
    Rename("layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    Rename("layers.{i}.mlp.gate_proj.*", "layers.{i}.mlp.gate.*"),
    Rename("layers.{i}.mlp.up_proj.*", "layers.{i}.mlp.up.*"),
    Rename("layers.{i}.mlp.down_proj.*", "layers.{i}.mlp.down.*"),
    Rename("norm.weight", "final_norm.weight"),
)

PARTS = {
    "lm": Part(
        (
            Tied("lm_head.weight", to="embed_tokens.weight", when=tied),
            Rename("lm_head.weight", "weight", when=untied),
        )
    ),
    # Two heads with the same name; `architectures` tells which one a file holds.
    "score": Part((Rename("score.*", "*"),)),
    "token score": Part((Rename("score.*", "*"),)),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}


def tasks(name: str, qa_prefix: str = "transformer.") -> dict[str, Task]:
    """The tasks of an architecture with Llama's body. name: prefix of its classes in transformers."""
    aliases = ("LLaMAForCausalLM",) if name == "Llama" else ()  # used by the first converted weights
    return {
        "base": Task(f"{name}Model", prefix=""),
        "causal-lm": Task(f"{name}ForCausalLM", {"lm": "head."}, class_aliases=aliases),
        "sequence-classification": Task(f"{name}ForSequenceClassification", {"score": "head."}),
        "token-classification": Task(f"{name}ForTokenClassification", {"token score": "head."}),
        "question-answering": Task(f"{name}ForQuestionAnswering", {"qa": "head."}, prefix=qa_prefix, labels=2),
    }


FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "intermediate_size",
    "hidden_act": "hidden_act",
    "max_position_embeddings": "max_positions",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "rms_norm_eps": "norm_eps",
    "attention_dropout": "attention_dropout",
    "classifier_dropout": "classifier_dropout",
    "pad_token_id": "pad_token_id",
    "initializer_range": "initializer_range",
}
HEAD_DIM = {"head_dim": "head_dim"}
BIASES = {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
WINDOWS = {name: name for name in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")}


class LlamaFields(RopeFields):
    """Rotary fields; a null `attention_dropout` means none, as in transformers."""

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = super().read(values)
        return values | ({"attention_dropout": 0.0} if values.get("attention_dropout", 0.0) is None else {})


class Qwen2Fields(LlamaFields):
    """Adds `head_dim`, which published files of Qwen2 lack: it is written if it differs from the default."""

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = super().write(values)
        if values["head_dim"] * values["num_attention_heads"] == values["hidden_size"]:
            del values["head_dim"]
        return values


ROPE = LlamaFields({"rope_theta": "rope_theta"})
REQUIRED = {
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
# pretraining_tp: into how many parts Meta's pretraining split each matrix; the products are the same. The fields after
# is_llama_config have an effect only in other models; transformers' own test models have them.
IGNORED = frozenset(
    "pretraining_tp is_llama_config attention_probs_dropout_prob hidden_dropout_prob type_vocab_size".split()
)


def llama_arch(
    model_type: str,
    name: str,
    fields: Mapping[str, str],
    qa_prefix: str = "transformer.",
    translation: LlamaFields = ROPE,
    ignored: Collection[str] = (),
) -> ArchMap:
    """The rules of an architecture with Llama's names, whose config has these fields in addition to FIELDS, and these
    ignored ones in addition to IGNORED."""
    return ArchMap(
        model_type=model_type,
        prefix="model.",
        body=BODY,
        parts=PARTS,
        tasks=with_embedding(tasks(name, qa_prefix)),
        config=ConfigMap(
            {**FIELDS, **fields}, required=REQUIRED, ignored=IGNORED.union(ignored), translation=translation
        ),
        ignore=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|(cos|sin)_cached)",),
    )


ARCH = llama_arch("llama", "Llama", HEAD_DIM | BIASES)
QWEN2 = llama_arch("qwen2", "Qwen2", WINDOWS | HEAD_DIM, translation=Qwen2Fields(ROPE.names))
QWEN3 = llama_arch("qwen3", "Qwen3", WINDOWS | HEAD_DIM | {"attention_bias": "attention_bias"})
MISTRAL = llama_arch("mistral", "Mistral", HEAD_DIM | {"sliding_window": "sliding_window"}, qa_prefix="model.")
