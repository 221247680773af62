"""NomicBERT's checkpoints: rules and config of transformers' `nomic_bert` models, and of their authors'.

Files, including those that transformers writes, have the names of the authors' code: query, key and value are one
tensor. In transformers' model they are three, and most names differ (`IN_MODEL`). The authors' models with a head have
the prefix `bert.`, and no biases in the vocabulary's head: biases that a file lacks start at zero, which is equivalent.

The authors' config.json has GPT-2's names or, today, these and those of transformers; transformers' are written. It
also names their code (`auto_map`), which cannot read what transformers writes for models with a head: it is left out.
"""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert.bert import FIELDS, OLD_SPELLINGS
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap, set_once
from modelcenter.convert.rope import RopeFields
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Split, Task, Tied, tied, untied, with_embedding

_LAYER = "encoder.layers.{i}"
_EMBEDDINGS: tuple[Rule, ...] = (
    Rename("embeddings.word_embeddings.weight", "embed.weight"),
    Rename("embeddings.token_type_embeddings.weight", "token_type.weight"),
)
BODY: tuple[Rule, ...] = (
    *_EMBEDDINGS,
    Rename("emb_ln.*", "embed_norm.*"),
    Split(f"{_LAYER}.attn.Wqkv.*", ("layers.{i}.attn.q.*", "layers.{i}.attn.k.*", "layers.{i}.attn.v.*")),
    Rename(f"{_LAYER}.attn.out_proj.*", "layers.{i}.attn.out.*"),
    Rename(f"{_LAYER}.norm1.*", "layers.{i}.attn_norm.*"),
    Rename(f"{_LAYER}.mlp.fc11.*", "layers.{i}.mlp.up.*"),
    Rename(f"{_LAYER}.mlp.fc12.*", "layers.{i}.mlp.gate.*"),
    Rename(f"{_LAYER}.mlp.fc2.*", "layers.{i}.mlp.down.*"),
    Rename(f"{_LAYER}.norm2.*", "layers.{i}.mlp_norm.*"),
)
IN_MODEL: tuple[Rule, ...] = (
    *_EMBEDDINGS,
    Rename("embeddings.LayerNorm.*", "embed_norm.*"),
    Rename("layers.{i}.self_attn.q_proj.*", "layers.{i}.attn.q.*"),
    Rename("layers.{i}.self_attn.k_proj.*", "layers.{i}.attn.k.*"),
    Rename("layers.{i}.self_attn.v_proj.*", "layers.{i}.attn.v.*"),
    Rename("layers.{i}.self_attn.o_proj.*", "layers.{i}.attn.out.*"),
    Rename("layers.{i}.post_attention_layernorm.*", "layers.{i}.attn_norm.*"),
    Rename("layers.{i}.mlp.up_proj.*", "layers.{i}.mlp.up.*"),
    Rename("layers.{i}.mlp.gate_proj.*", "layers.{i}.mlp.gate.*"),
    Rename("layers.{i}.mlp.down_proj.*", "layers.{i}.mlp.down.*"),
    Rename("layers.{i}.post_mlp_layernorm.*", "layers.{i}.mlp_norm.*"),
)

_HEAD = "cls.predictions"
PARTS = {
    "pooler": Part((Rename("pooler.dense.*", "*"),), prefixed=True),
    "lm": Part(
        (
            Rename(f"{_HEAD}.transform.dense.weight", "dense.weight"),
            Rename(f"{_HEAD}.transform.dense.bias", "dense.bias", optional=True),
            Rename(f"{_HEAD}.transform.layer_norm.*", "norm.*"),
            Rename(f"{_HEAD}.bias", "bias", when=tied, optional=True),
            Tied(f"{_HEAD}.decoder.weight", to="embeddings.word_embeddings.weight", when=tied),
            Tied(f"{_HEAD}.decoder.bias", to=f"{_HEAD}.bias", when=tied),
            Rename(f"{_HEAD}.decoder.weight", "weight", when=untied),
            Rename(f"{_HEAD}.decoder.bias", "bias", when=untied, optional=True),
            Tied(f"{_HEAD}.bias", to=f"{_HEAD}.decoder.bias", compare=False, write=True, when=untied),
        )
    ),
    # Two heads with the same name; `architectures` tells which one a file holds.
    "classifier": Part((Rename("classifier.*", "*"),)),
    "token classifier": Part((Rename("classifier.*", "*"),)),
}

TASKS = {
    "base": Task("NomicBertModel", prefix=""),
    "masked-lm": Task("NomicBertForMaskedLM", {"lm": "head."}, class_aliases=("NomicBertForPreTraining",)),
    "sequence-classification": Task("NomicBertForSequenceClassification", {"pooler": "pooler.", "classifier": "head."}),
    "token-classification": Task("NomicBertForTokenClassification", {"token classifier": "head."}),
}

# The authors' names -> transformers'.
AUTHORS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "max_trained_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "rotary_emb_base": "rope_theta",
}
# The authors' names of activations of a gated feed-forward.
_GATED = {"swiglu": "silu", "geglu": "gelu"}
# The authors' code rounds the width of a feed-forward up to a multiple of this.
_MULTIPLE = 256


class _Fields(RopeFields):
    """Rotary fields, and the authors' names."""

    @property
    def handles(self) -> frozenset[str]:
        return super().handles | {*AUTHORS, "activation_function", "auto_map", "rotary_scaling_factor"}

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields under transformers' names, in the form of version 4.

        Raises:
            ValueError: a field has two names with different values, or a feed-forward is not gated.
        """
        values = super().read(values)
        values.pop("auto_map", None)
        if (kind := values.pop("activation_function", None)) is not None:
            if kind not in _GATED:
                raise ValueError(f"activation_function: got {kind!r:.80}, expected one of {', '.join(_GATED)}")
            set_once(values, "hidden_act", _GATED[kind], "activation_function")
        for name, ours in AUTHORS.items():
            if (value := values.pop(name, None)) is not None:
                if name == "n_inner" and isinstance(value, int):
                    value = -(-value // _MULTIPLE) * _MULTIPLE
                set_once(values, ours, value, name)
        if factor := values.pop("rotary_scaling_factor", None):
            set_once(values, "rope_scaling", {"rope_type": "dynamic", "factor": factor}, "rotary_scaling_factor")
        return values


# Options of the authors' code for other networks.
OTHER_NETWORKS: dict[str, tuple[Any, ...]] = {
    **BIDIRECTIONAL,
    "causal": (False,),
    "norm_mlp": (False,),
    "num_heads_kv": (None,),
    "parallel_block": (False,),
    "prenorm": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_head_dim": (False,),
    "use_rms_norm": (False, None),
}
# Performance options of the authors' code, fields of GPT-2 that it does not read, and notes. n_positions is the maximum
# length of a text if angles are scaled; vocabulary sizes in files are rounded up already.
WITHOUT_EFFECT = frozenset(
    """add_pooling_layer dense_seq_output fused_bias_fc fused_dropout_add_ln n_positions
    pad_vocab_size_multiple parallel_block_tied_norm reorder_and_upcast_attn scale_attn_by_inverse_layer_idx
    scale_attn_weights summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    use_flash_attn use_xentropy""".split()
)

CONFIG = ConfigMap(
    fields={
        **FIELDS,
        "head_dim": "head_dim",
        "rope_theta": "rope_theta",
        "rope_scaling": "rope_scaling",
        "classifier_dropout": "classifier_dropout",
    },
    required={
        **OTHER_NETWORKS,
        "embd_pdrop": (0.0,),
        "mlp_fc1_bias": (False,),
        "mlp_fc2_bias": (False,),
        "num_experts": (0, None),
        "qkv_proj_bias": (False,),
    },
    ignored=WITHOUT_EFFECT,
    translation=_Fields({"rope_theta": "rope_theta"}),
)

ARCH = ArchMap(
    model_type="nomic_bert",
    prefix="nomic_bert.",
    body=BODY,
    body_in_model=IN_MODEL,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=(r"embeddings\.(position_ids|token_type_ids)", r"(.*\.)?rotary_emb\.(original_)?inv_freq"),
    old_spellings=((r"^bert\.", "nomic_bert."), *OLD_SPELLINGS),
)
