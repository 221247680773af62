"""ModelCenter's networks that exist in transformers: T5, RoBERTa, BERT, OPT, Llama, GPT-2 and GPT-J."""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert.legacy.tensor_rules import (
    bert_rules,
    encoder_decoder_rules,
    gpt2_rules,
    gptj_rules,
    llama_rules,
    opt_rules,
)
from modelcenter.convert.legacy.translation import Config, LegacyNetwork
from modelcenter.convert.pieces import Shape

T5_SCALE = 100.0  # of hidden states; each matrix of a feed-forward network takes its square root
_ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")


def _activation(config: Config) -> str:
    name = str(config["ffn_activate_fn"])
    act = name.removeprefix("gated_")
    if act not in _ACTIVATIONS:
        expected = ", ".join((*_ACTIVATIONS, *(f"gated_{known}" for known in _ACTIVATIONS)))
        raise ValueError(f"ModelCenter config field 'ffn_activate_fn': got {name!r}, expected one of {expected}")
    return act


def _t5_fields(config: Config) -> dict[str, Any]:
    act, gated, tied = _activation(config), str(config["ffn_activate_fn"]).startswith("gated_"), bool(config["tied"])
    if not gated and act != "relu":
        raise ValueError(
            f"ModelCenter config field 'ffn_activate_fn': got {act!r} without a gate; the scaling of such a network's "
            "weights cannot be undone, as it can for relu and gated activations"
        )
    if config.get("scale") and not tied:
        raise ValueError("ModelCenter config field 'scale': got true with tied false, which no T5 of transformers has")
    return {
        "dense_act_fn": act,
        "is_gated_act": gated,
        "is_encoder_decoder": True,
        "scale_decoder_outputs": tied,
        "decoder_start_token_id": 0,
    }


def _gpt_fields(config: Config) -> dict[str, Any]:
    return {"activation_function": _activation(config)}


def _llama_fields(config: Config) -> dict[str, Any]:
    act = _activation(config)
    if not str(config["ffn_activate_fn"]).startswith("gated_"):
        raise ValueError(
            f"ModelCenter config field 'ffn_activate_fn': got {act!r}, expected 'gated_{act}': a Llama has a gate"
        )
    if config["dropout_p"]:
        raise ValueError(
            f"ModelCenter config field 'dropout_p': got {config['dropout_p']!r}, expected 0: transformers' Llama has "
            "no dropout after attention and feed-forward. Set it to 0 in config.json; it affects training only"
        )
    kv_heads = config["num_heads_kv"]
    return {"hidden_act": act, "num_key_value_heads": config["num_heads"] if kv_heads == -1 else kv_heads}


_HEAD_BIAS = frozenset(("proj_bias",))  # a head has the bias if the file has it
_COMMON: dict[str, Any] = {"tied": True, "cls_head": None}
_GPT_FIELDS = {
    "vocab_size": ("vocab_size",),
    "dim_model": ("n_embd",),
    "num_heads": ("n_head",),
    "dim_ff": ("n_inner",),
    "num_layers": ("n_layer",),
    "dropout_p": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "norm_eps": ("layer_norm_epsilon",),
    "tied": ("tie_word_embeddings",),
}
_PLAIN = {"norm_bias": (True,), "attn_scale": (True,), "ffn_bias": (True,)}


def _bert(prefix: str, head: tuple[str, str, str], defaults: dict[str, Any], **kwargs: Any) -> LegacyNetwork:
    return LegacyNetwork(
        rules=bert_rules(prefix, *head),
        defaults={
            **_COMMON,
            **defaults,
            "dim_head": 64,
            "dropout_p": 0.0,
            "ffn_activate_fn": "gelu",
        },
        fields={
            "vocab_size": ("vocab_size",),
            "type_size": ("type_vocab_size",),
            "dim_model": ("hidden_size",),
            "num_heads": ("num_attention_heads",),
            "dim_ff": ("intermediate_size",),
            "num_layers": ("num_hidden_layers",),
            "dropout_p": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
            "position_size": ("max_position_embeddings",),
            "norm_eps": ("layer_norm_eps",),
            "tied": ("tie_word_embeddings",),
            **({"pad_token_id": ("pad_token_id",)} if "pad_token_id" in defaults else {}),
        },
        required={**_PLAIN, "att_bias": (True,), "post_layer_norm": (True,), "pos_bias_type": ("none",)},
        classes=("ForMaskedLM", "ForTokenClassification"),
        derived_fields=lambda config: {"hidden_act": _activation(config)},
        unread=lambda config: ("lm_head.decoder.weight",) if config.get("tie_word_embeddings", True) else (),
        **kwargs,
    )


def _is_roberta(config: Config, shapes: Mapping[str, Shape]) -> bool:
    """RoBERTa has BERT's names, but a single token type or a pad_token_id."""
    types = shapes.get("token_type_embedding.weight")
    return types is not None and (types[0] == 1 or "pad_token_id" in config)


def _turns_positions(shapes: Mapping[str, Shape]) -> bool:
    """Llama's and GPT-J's rotary positions have no tensors; GPT-J's norms have biases."""
    return not any("position" in name or "segment" in name for name in shapes)


T5 = LegacyNetwork(
    model_types={"t5": "T5", "mt5": "MT5"},
    recognises=lambda config, shapes: "position_bias_enc.relative_attention_bias" in shapes,
    rules=encoder_decoder_rules(T5_SCALE),
    defaults={
        **_COMMON,
        "vocab_size": 32128,
        "dim_model": 768,
        "num_heads": 12,
        "dim_head": 64,
        "dim_ff": 3072,
        "num_encoder_layers": 12,
        "num_decoder_layers": 12,
        "dropout_p": 0.0,
        "position_bias_num_buckets": 32,
        "position_bias_max_distance": 128,
        "norm_eps": 1e-6,
        "ffn_activate_fn": "relu",
        "scale": None,
    },
    fields={
        "vocab_size": ("vocab_size",),
        "dim_model": ("d_model",),
        "num_heads": ("num_heads",),
        "dim_head": ("d_kv",),
        "dim_ff": ("d_ff",),
        "num_encoder_layers": ("num_layers",),
        "num_decoder_layers": ("num_decoder_layers",),
        "dropout_p": ("dropout_rate",),
        "position_bias_num_buckets": ("relative_attention_num_buckets",),
        "position_bias_max_distance": ("relative_attention_max_distance",),
        "norm_eps": ("layer_norm_epsilon",),
        "tied": ("tie_word_embeddings",),
    },
    required={
        **dict.fromkeys(("norm_bias", "attn_scale", "att_bias", "ffn_bias", "proj_bias"), (False,)),
        "post_layer_norm": (False,),
        "pos_bias_type": ("relative",),
    },
    classes=("ForConditionalGeneration", ""),
    derived_fields=_t5_fields,
)
ROBERTA = _bert(
    "roberta.",
    ("lm_head", "dense", "layer_norm"),
    {
        "vocab_size": 50265,
        "type_size": 1,
        "dim_model": 1024,
        "num_heads": 16,
        "dim_ff": 4096,
        "num_layers": 24,
        "position_size": 514,
        "norm_eps": 1e-5,
        "pad_token_id": 1,
    },
    model_types={"roberta": "Roberta", "xlm-roberta": "XLMRoberta"},
    recognises=_is_roberta,
    ignored=_HEAD_BIAS,
)
BERT = _bert(
    "bert.",
    ("cls.predictions", "transform.dense", "transform.LayerNorm"),
    {
        "vocab_size": 119547,
        "type_size": 2,
        "dim_model": 768,
        "num_heads": 12,
        "dim_ff": 3072,
        "num_layers": 12,
        "position_size": 512,
        "norm_eps": 1e-12,
    },
    model_types={"bert": "Bert"},
    recognises=lambda config, shapes: "token_type_embedding.weight" in shapes,
    ignored=_HEAD_BIAS,
)
OPT = LegacyNetwork(
    model_types={"opt": "OPT"},
    recognises=lambda config, shapes: (
        "position_embedding.weight" in shapes and any(name.startswith("decoder.layers.") for name in shapes)
    ),
    rules=opt_rules,
    defaults={
        "cls_head": None,
        "vocab_size": 50272,
        "dim_model": 768,
        "num_heads": 12,
        "dim_head": 64,
        "dim_ff": 3072,
        "num_layers": 12,
        "dropout_p": 0.1,
        "position_size": 2048,
        "pad_token_id": 1,
        "ffn_activate_fn": "relu",
    },
    fields={
        "vocab_size": ("vocab_size",),
        "dim_model": ("hidden_size",),
        "num_heads": ("num_attention_heads",),
        "dim_ff": ("ffn_dim",),
        "num_layers": ("num_hidden_layers",),
        "dropout_p": ("dropout", "attention_dropout"),
        "position_size": ("max_position_embeddings",),
        "pad_token_id": ("pad_token_id",),
    },
    required={
        **_PLAIN,
        "att_bias": (True,),
        "norm_eps": (1e-5,),
        "post_layer_norm": (False,),
        "pos_bias_type": ("none",),
    },
    classes=("ForCausalLM", ""),
    derived_fields=_gpt_fields,
    ignored=_HEAD_BIAS | {"tied", "prefix"},  # its head is the embedding, whatever `tied` says
)
LLAMA = LegacyNetwork(
    model_types={"llama": "Llama"},
    recognises=lambda config, shapes: _turns_positions(shapes) and "encoder.output_layernorm.bias" not in shapes,
    rules=llama_rules,
    defaults={
        **_COMMON,
        "tied": False,
        "vocab_size": 32000,
        "dim_model": 4096,
        "num_heads": 32,
        "num_heads_kv": -1,
        "dim_head": 128,
        "dim_ff": 11008,
        "num_layers": 32,
        "dropout_p": 0.0,
        "norm_eps": 1e-6,
        "att_bias": False,
        "ffn_bias": False,
        "ffn_activate_fn": "gated_silu",
    },
    fields={
        "vocab_size": ("vocab_size",),
        "dim_model": ("hidden_size",),
        "num_heads": ("num_attention_heads",),
        "dim_head": ("head_dim",),
        "dim_ff": ("intermediate_size",),
        "num_layers": ("num_hidden_layers",),
        "norm_eps": ("rms_norm_eps",),
        "att_bias": ("attention_bias",),
        "ffn_bias": ("mlp_bias",),
        "tied": ("tie_word_embeddings",),
    },
    required={
        "norm_bias": (False,),
        "attn_scale": (True,),
        "proj_bias": (False,),
        "post_layer_norm": (False,),
        "pos_bias_type": ("rotary",),
    },
    classes=("ForCausalLM", ""),
    derived_fields=_llama_fields,
)
GPT2 = LegacyNetwork(
    model_types={"gpt2": "GPT2"},
    recognises=lambda config, shapes: "position_embedding.weight" in shapes,
    rules=gpt2_rules,
    defaults={
        **_COMMON,
        "vocab_size": 50258,
        "dim_model": 1024,
        "num_heads": 16,
        "dim_head": 64,
        "dim_ff": 4096,
        "num_layers": 24,
        "dropout_p": 0.0,
        "position_size": 1024,
        "norm_eps": 1e-5,
        "ffn_activate_fn": "gelu",
    },
    fields=_GPT_FIELDS | {"position_size": ("n_positions",)},
    required={**_PLAIN, "att_bias": (True,), "post_layer_norm": (False,), "pos_bias_type": ("none",)},
    classes=("LMHeadModel", "ForTokenClassification"),
    derived_fields=_gpt_fields,
    ignored=_HEAD_BIAS,
)
GPTJ = LegacyNetwork(
    model_types={"gptj": "GPTJ"},
    recognises=lambda config, shapes: _turns_positions(shapes),
    rules=gptj_rules,
    defaults={
        **_COMMON,
        "tied": False,
        "vocab_size": 50400,
        "dim_model": 4096,
        "num_heads": 16,
        "dim_head": 256,
        "dim_ff": 16384,
        "num_layers": 28,
        "dropout_p": 0.0,
        "pos_rotary_dim": 64,
        "norm_eps": 1e-5,
        "ffn_activate_fn": "gelu",
    },
    fields=_GPT_FIELDS | {"pos_rotary_dim": ("rotary_dim",)},
    required={**_PLAIN, "att_bias": (False,), "post_layer_norm": (False,), "pos_bias_type": ("rotary",)},
    classes=("ForCausalLM", ""),
    derived_fields=_gpt_fields,
    ignored=_HEAD_BIAS,
)
