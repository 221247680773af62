"""BLOOM's checkpoints: rules and config of transformers' `bloom` models.

Query, key and value of a head are next to each other in one tensor, head after head, as in GPT-NeoX. Published configs
use one of two names for the numbers of layers and heads and for the width, and record Megatron-DeepSpeed's settings.
"""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert.config_map import ConfigMap, set_once
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Split, Task, Tied, tied, untied, with_embedding

BODY: tuple[Rule, ...] = (
    Rename("word_embeddings.weight", "embed.weight"),
    Rename("word_embeddings_layernorm.*", "embed_norm.*"),
    Rename("h.{i}.input_layernorm.*", "layers.{i}.attn_norm.*"),
    Split(
        "h.{i}.self_attention.query_key_value.*",
        ("layers.{i}.attn.q.*", "layers.{i}.attn.k.*", "layers.{i}.attn.v.*"),
        groups=lambda config: config.num_heads,
    ),
    Rename("h.{i}.self_attention.dense.*", "layers.{i}.attn.out.*"),
    Rename("h.{i}.post_attention_layernorm.*", "layers.{i}.mlp_norm.*"),
    Rename("h.{i}.mlp.dense_h_to_4h.*", "layers.{i}.mlp.up.*"),
    Rename("h.{i}.mlp.dense_4h_to_h.*", "layers.{i}.mlp.down.*"),
    Rename("ln_f.*", "final_norm.*"),
)

PARTS = {
    "lm": Part(
        (
            Tied("lm_head.weight", to="word_embeddings.weight", when=tied),
            Rename("lm_head.weight", "weight", when=untied),
        )
    ),
    "score": Part((Rename("score.*", "*"),)),
    "classifier": Part((Rename("classifier.*", "*"),)),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}

TASKS = {
    "base": Task("BloomModel", prefix=""),
    "causal-lm": Task("BloomForCausalLM", {"lm": "head."}),
    "sequence-classification": Task("BloomForSequenceClassification", {"score": "head."}),
    "token-classification": Task("BloomForTokenClassification", {"classifier": "head."}),
    "question-answering": Task("BloomForQuestionAnswering", {"qa": "head."}, labels=2),
}

# Two sets of names: those of the first files, and those of transformers.
_SPELLINGS = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


class _Fields:
    """Handles alternative names of sizes, and a mode of multiplication that only transformers has."""

    handles = frozenset(_SPELLINGS)

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError if a size has two names with different values, or if biases would be left out."""
        values = dict(values)
        for other, name in _SPELLINGS.items():
            set_once(values, name, values.pop(other, None), other)
        parts = values.get("pretraining_tp", 1)
        if values.get("slow_but_exact") and parts != 1:
            raise ValueError(
                f"config field 'slow_but_exact': got True with a pretraining_tp of {parts!r}, for which transformers "
                "leaves out the biases after attention and feed-forward; expected False"
            )
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(values)


CONFIG = ConfigMap(
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "layer_norm_epsilon": "norm_eps",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "classifier_dropout": "classifier_dropout",
        "initializer_range": "initializer_range",
    },
    # No published model has the first. The second is never read, but would mean another width.
    required={"apply_residual_connection_post_layernorm": (False,), "n_inner": (None,)},
    # Settings of Megatron-DeepSpeed, its sequence length, and a constant that is the same for all keys. The last two
    # are in transformers' own test models, and had no effect in any version.
    ignored=frozenset(
        """attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi pad_token_id pretraining_tp
        seq_length skip_bias_add skip_bias_add_qkv slow_but_exact n_positions type_vocab_size""".split()
    ),
    translation=_Fields(),
)

ARCH = ArchMap(
    model_type="bloom",
    prefix="transformer.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
)
