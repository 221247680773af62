"""ModelCenter's and CPM-Live's checkpoints of CPM-1, CPM-2, CPM-3 and CPM-Bee.

Tensors of CPM-1, CPM-3 and CPM-Bee already have the names in our directories; those of CPM-2 are T5's, without a scale.
Its config.json is like T5's: it is recognised by a vocabulary of 26240, or by the class that the caller loads it with.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from modelcenter.convert.legacy.megatron import is_megatron
from modelcenter.convert.legacy.networks import T5
from modelcenter.convert.legacy.tensor_rules import encoder_decoder_rules
from modelcenter.convert.legacy.translation import Config, LegacyNetwork
from modelcenter.convert.pieces import Shape

BIAS = "position_bias.relative_attention_bias"

_FIELDS = {
    "vocab_size": ("vocab_size",),
    "dim_model": ("hidden_size",),
    "num_heads": ("num_heads",),
    "dim_head": ("head_dim",),
    "dim_ff": ("intermediate_size",),
    "num_layers": ("num_layers",),
    "dropout_p": ("dropout",),
    "position_bias_num_buckets": ("num_buckets",),
    "position_bias_max_distance": ("max_distance",),
    "norm_eps": ("norm_eps",),
    "length_scale": ("length_scale",),
    "attn_scale": ("attn_scale",),
    "tied": ("tie_word_embeddings",),
}
_PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("norm_bias", "att_bias", "ffn_bias", "proj_bias", "post_layer_norm"), (False,)),
    "cls_head": (None,),
    "ffn_activate_fn": ("gated_gelu",),
    "length_scale": (True, False),
    "mask_modules": (None,),
    "pos_bias_type": ("relative",),
}


def _is_bee(config: Config, shapes: Mapping[str, Shape]) -> bool:
    return BIAS in shapes and "position_bias_num_segment_buckets" in config


def _is_cpm1(config: Config, shapes: Mapping[str, Shape]) -> bool:
    return BIAS in shapes and "prompt_embedding.weight" not in shapes and not _is_bee(config, shapes)


def _is_cpm2(config: Config, shapes: Mapping[str, Shape]) -> bool:
    if is_megatron(shapes):
        return True
    return "position_bias_enc.relative_attention_bias" in shapes and shapes["input_embedding.weight"][0] == 26240


def _is_cpm3(config: Config, shapes: Mapping[str, Shape]) -> bool:
    return "prompt_embedding.weight" in shapes and "segment_embedding.weight" not in shapes


def _network(
    name: str,
    recognises: Callable[[Config, Mapping[str, Shape]], bool],
    defaults: dict[str, Any],
    fields: Mapping[str, tuple[str, ...]] | None = None,
) -> LegacyNetwork:
    """A network whose tensors keep their names.

    Args:
        fields: its fields in addition to those of _FIELDS that `defaults` names.
    """
    return LegacyNetwork(
        model_types={name.lower(): name},
        recognises=recognises,
        rules=lambda config, last: [],
        defaults={"dropout_p": 0.0, "norm_eps": 1e-6, **defaults},
        fields={
            **{k: v for k, v in _FIELDS.items() if k in defaults or k in ("dropout_p", "norm_eps")},
            **(fields or {}),
        },
        required={**_PLAIN, "absolute_inner_segment": (True,)},
        classes=("ForCausalLM", ""),
        # A tied head's matrix is the embedding; one that a file also holds is never read.
        unread=lambda config: ("output_projection.weight",) if config.get("tie_word_embeddings", True) else (),
        ignored=frozenset(("max_distance_rate", "max_exact_rate")),
    )


_CPM2_TOKENS = {"decoder_start_token_id": 1, "pad_token_id": 5, "eos_token_id": 8}  # <s>, <pad> and <eod>

_CPM3_SIZES = {
    "vocab_size": 30720,
    "dim_model": 4096,
    "num_heads": 64,
    "dim_head": 64,
    "dim_ff": 10240,
    "num_layers": 32,
    "position_bias_num_buckets": 512,
    "position_bias_max_distance": 2048,
}

CPM1 = _network(
    "CPM1",
    _is_cpm1,
    {
        "vocab_size": 30968,
        "dim_model": 768,
        "num_heads": 12,
        "dim_head": 64,
        "dim_ff": 1920,
        "num_layers": 12,
        "position_bias_num_buckets": 32,
        "position_bias_max_distance": 128,
        "length_scale": False,
        "attn_scale": False,
        "tied": False,
    },
)

CPM3 = _network(
    "CPM3",
    _is_cpm3,
    {
        **_CPM3_SIZES,
        "length_scale": True,
        "attn_scale": True,
        "tied": True,
        "prompt_types": 32,
        "prompt_length": 64,
        "segment_types": 34,
    },
    {name: (name,) for name in ("prompt_types", "prompt_length", "segment_types")},
)

CPM_BEE = _network(
    "CpmBee",
    _is_bee,
    {
        **_CPM3_SIZES,
        "position_bias_num_buckets": 256,
        "position_bias_num_segment_buckets": 256,
        "eps": 1e-6,
    },
    {"position_bias_num_segment_buckets": ("num_relations",), "eps": ("norm_eps",)},
)

CPM2 = replace(
    T5,
    model_types={"cpm2": "CPM2"},
    recognises=_is_cpm2,
    rules=encoder_decoder_rules(1.0),
    defaults={
        **T5.defaults,
        "vocab_size": 26240,
        "dim_ff": 1920,
        "tied": False,
        "ffn_activate_fn": "gated_gelu",
    },
    classes=("ForConditionalGeneration", ""),
    # Unlike T5's, a tied head reads the decoder's states unscaled.
    derived_fields=lambda config: {**T5.derived_fields(config), "scale_decoder_outputs": False, **_CPM2_TOKENS},
)
