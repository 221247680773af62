"""The fields of a config.json under our names, with defaults for those that it omits. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from modelcenter import registry
from modelcenter.convert.rules import ArchMap

COMPOSED, SIDES = "encoder-decoder", ("encoder", "decoder")
OF_TWO = (COMPOSED, "t5gemma")  # their config has a config for each side
# Defaults of fields that published configs omit.
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "longformer"),
        {"max_positions": 512, "type_vocab_size": 2},
    ),
    "albert": {"max_positions": 512, "type_vocab_size": 2, "embedding_size": 128, "num_groups": 1, "group_layers": 1},
    "distilbert": {"max_positions": 512, "type_vocab_size": 0},
    **dict.fromkeys(
        ("deberta", "deberta-v2"), {"max_positions": 512, "position_input": True, "type_vocab_size": 0, "legacy": True}
    ),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), {"decoder_bias": True}),
    "mpnet": {"max_positions": 512, "type_vocab_size": 0, "num_buckets": 32},
    "ernie": {"max_positions": 512, "type_vocab_size": 2, "task_type_vocab_size": 3},
    "eurobert": {"tie_embeddings": False},
    "nomic_bert": {"type_vocab_size": 2},
    "nomic_bert_moe": {"type_vocab_size": 2, "num_experts": 0},
    "gte": {"type_vocab_size": 1},
    "esm": {"max_positions": 1026, "position_type": "absolute"},
    "electra": {"max_positions": 512, "type_vocab_size": 2, "embedding_size": 128},
    "gpt2": {"max_positions": 1024},
    "gptj": {"tie_embeddings": False},
    "gpt_neox": {"attention_bias": True, "tie_embeddings": False},
    "granite": {"tie_embeddings": False},
    "granitemoe": {"num_experts": 8, "experts_per_token": 2, "sparse_step": 1, "tie_embeddings": False},
    "llama": {"tie_embeddings": False},
    "qwen2": {"tie_embeddings": False},
    "opt": {"max_positions": 2048, "bias": True, "pre_norm": True},
    "mistral": {"num_kv_heads": 8, "tie_embeddings": False},
    "mixtral": {"num_kv_heads": 8, "num_experts": 8, "experts_per_token": 2, "sparse_step": 1}
    | {"tie_embeddings": False},
    "olmo2": {"tie_embeddings": False},
    "olmoe": {"num_experts": 64, "experts_per_token": 8, "sparse_step": 1, "tie_embeddings": False},
    "phi3": {"tie_embeddings": False},
    "qwen2_moe": {"num_experts": 60, "experts_per_token": 4, "expert_intermediate_size": 1408}
    | {"shared_intermediate_size": 5632, "sparse_step": 1, "qkv_bias": True, "tie_embeddings": False},
    "qwen3": {"head_dim": 128, "tie_embeddings": False},
    "qwen3_moe": {"num_experts": 128, "experts_per_token": 8, "expert_intermediate_size": 768}
    | {"num_kv_heads": 4, "sparse_step": 1, "tie_embeddings": False},
    "smollm3": {"num_kv_heads": 4},
    "gemma": {"num_kv_heads": 16, "head_dim": 256},
    **dict.fromkeys(("gemma2", "gemma3_text", "t5_gemma_module"), {"num_kv_heads": 4, "head_dim": 256}),
    "minicpm3": {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
    "t5": {"head_dim": 64, "num_buckets": 32},
    "mt5": {"head_dim": 64, "num_buckets": 32, "gated": True, "tie_embeddings": False},
    "umt5": {"head_dim": 64, "num_buckets": 32, "gated": True},
    **dict.fromkeys(("bart", "mbart", "m2m_100", "marian", "pegasus"), {"max_positions": 1024}),
    "led": {"max_positions": 16384, "max_decoder_positions": 1024},
    "cpm1": {"num_buckets": 32, "tie_embeddings": False},
    "cpm3": {"num_buckets": 512, "prompt_types": 32, "prompt_length": 64, "segment_types": 34},
    "cpmbee": {"num_buckets": 256, "num_relations": 256},
    "cpmant": {"num_buckets": 512, "prompt_types": 32, "prompt_length": 32, "segment_types": 32},
}


def our_names(config: Mapping[str, Any], arch: ArchMap) -> dict[str, Any]:
    """The fields of a config.json under our names; unknown fields keep theirs."""
    given = dict(config) if arch.config.translation is None else arch.config.translation.read(config)
    if (kind := given.pop("feed_forward_proj", None)) is not None:  # T5's
        given.setdefault("is_gated_act", str(kind).startswith("gated-"))
    ours = {arch.config.fields.get(key, key): value for key, value in given.items()}
    if arch.model_type in OF_TWO:
        one, other = (side_of(config, name)[0] for name in SIDES)
        of_decoder = {"num_decoder_layers": "num_layers", "decoder_hidden_size": "hidden_size"}
        ours = one | ours | {"vocab_size": other.get("vocab_size")}
        ours |= {name: other.get(theirs) for name, theirs in of_decoder.items()}
    return ours


def side_of(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One side of an encoder-decoder with two configs: fields under our names, with defaults, and its config.json.

    Raises:
        ValueError: the config lacks that side.
    """
    side, kind = config.get(name), registry.model_type_of(config)
    if not isinstance(side, Mapping):
        raise ValueError(f"config.json of an {kind} lacks {name}, so its size is not known")
    rules = registry.get(str(kind)).arch_map().config.side_rules(name, side)
    return _DEFAULTS.get(rules.model_type, {}) | our_names(side, rules), dict(side)


_OFF = frozenset(  # unless the config says otherwise
    """cross_attention attention_bias mlp_bias norm_bias classifier_bias gated remove_final_norm q_lora_rank
    relative_attention use_task_id norm_distances norm_embeddings share_projections conv_width num_groups dense_layers
    num_experts expert_interval shared_intermediate_size""".split()
)


class Fields:
    """Our names as attributes, with what follows from others: head_dim, num_kv_heads, intermediate_size."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if (value := self._values.get(name)) is not None:
            return config_fields(value) if name in SIDES else value
        if name == "head_dim":
            return self.hidden_size // self.num_heads
        derived = {
            "num_kv_heads": "num_heads",
            "num_decoder_layers": "num_layers",
            "decoder_intermediate_size": "intermediate_size",
            "embedding_size": "hidden_size",
            "expert_intermediate_size": "intermediate_size",
            "max_distance": "max_positions",
            "position_buckets": "max_distance",
        }
        if name in derived:
            return getattr(self, derived[name])
        if name in _OFF:
            return False
        raise KeyError(name)


def config_fields(config: Mapping[str, Any], arch: ArchMap | None = None) -> Fields:
    """The fields of a config.json that the conditions of conversion rules look at."""
    arch = arch or registry.get(str(config.get("model_type"))).arch_map()
    usual = _DEFAULTS.get(arch.model_type, {})
    tied = config.get("tie_word_embeddings", usual.get("tie_embeddings", True))
    return Fields(usual | our_names(config, arch) | {"tie_embeddings": tied})
