"""GPT-2's checkpoints: rules and config of transformers' `gpt2` models.

Projection weights are Conv1D: (in, out). Published files lack the prefix `transformer.`, and hold the causal masks
`attn.bias` and `attn.masked_bias`, which have no content.
"""

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import (
    CROSS_ATTENTION,
    ArchMap,
    Part,
    Rename,
    Rule,
    Split,
    Task,
    Tied,
    Transpose,
    tied,
    untied,
    with_cross_attention,
    with_embedding,
)

BODY: tuple[Rule, ...] = (
    Rename("wte.weight", "embed.weight"),
    Rename("wpe.weight", "position.weight"),
    Rename("h.{i}.ln_1.*", "layers.{i}.attn_norm.*"),
    Split(
        "h.{i}.attn.c_attn.*",
        ("layers.{i}.attn.q.*", "layers.{i}.attn.k.*", "layers.{i}.attn.v.*"),
        transpose=True,
    ),
    Transpose("h.{i}.attn.c_proj.*", "layers.{i}.attn.out.*"),
    Rename("h.{i}.ln_2.*", "layers.{i}.mlp_norm.*"),
    Transpose("h.{i}.mlp.c_fc.*", "layers.{i}.mlp.up.*"),
    Transpose("h.{i}.mlp.c_proj.*", "layers.{i}.mlp.down.*"),
    Rename("ln_f.*", "final_norm.*"),
)

PARTS = {
    CROSS_ATTENTION: Part(
        (
            Rename("h.{i}.ln_cross_attn.*", "layers.{i}.cross_norm.*"),
            Transpose("h.{i}.crossattention.q_attn.*", "layers.{i}.cross.q.*"),
            Split("h.{i}.crossattention.c_attn.*", ("layers.{i}.cross.k.*", "layers.{i}.cross.v.*"), transpose=True),
            Transpose("h.{i}.crossattention.c_proj.*", "layers.{i}.cross.out.*"),
        ),
        prefixed=True,
    ),
    "lm": Part(
        (
            Tied("lm_head.weight", to="wte.weight", when=tied),
            Rename("lm_head.weight", "weight", when=untied),
        )
    ),
    "score": Part((Rename("score.*", "*"),)),
    "classifier": Part((Rename("classifier.*", "*"),)),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
    "double choice": Part((Rename("multiple_choice_head.summary.*", "*"),)),
}

TASKS = {
    "base": Task("GPT2Model", prefix=""),
    "causal-lm": Task("GPT2LMHeadModel", {"lm": "head."}),
    "double-heads": Task("GPT2DoubleHeadsModel", {"lm": "head.lm.", "double choice": "head.choice."}),
    "sequence-classification": Task("GPT2ForSequenceClassification", {"score": "head."}),
    "token-classification": Task("GPT2ForTokenClassification", {"classifier": "head."}),
    "question-answering": Task("GPT2ForQuestionAnswering", {"qa": "head."}, labels=2),
}

CONFIG = ConfigMap(
    fields={
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "n_positions": "max_positions",
        "layer_norm_epsilon": "norm_eps",
        "resid_pdrop": "dropout",
        "embd_pdrop": "embedding_dropout",
        "attn_pdrop": "attention_dropout",
        "classifier_dropout": "classifier_dropout",
        "summary_first_dropout": "choice_dropout",
        "scale_attn_weights": "scale_attention",
        "scale_attn_by_inverse_layer_idx": "scale_attention_by_layer",
        "add_cross_attention": "cross_attention",
        "initializer_range": "initializer_range",
    },
    required={"is_decoder": (False, True)},  # it always is one, whatever the file says
    # reorder_and_upcast_attn changes the order of products in half precision, not the result. n_special and
    # predict_special_tokens belong to GPT-1, from which the first configs were copied.
    ignored=frozenset(
        """n_ctx n_special pad_token_id predict_special_tokens reorder_and_upcast_attn summary_activation
        summary_proj_to_labels summary_type summary_use_proj""".split()
    ),
)

ARCH = ArchMap(
    model_type="gpt2",
    prefix="transformer.",
    body=BODY,
    parts=PARTS,
    tasks=with_cross_attention(with_embedding(TASKS)),
    config=CONFIG,
    ignore=(r"h\.\d+\.(attn|crossattention)\.(masked_)?bias",),
)
