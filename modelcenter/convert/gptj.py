"""GPT-J's checkpoints: rules and config of transformers' `gptj` models.

Old files hold the causal masks `attn.bias` and `attn.masked_bias`, and some also the sine table `attn.embed_positions`:
these have no content.
"""

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Task, Tied, tied, untied, with_embedding

BODY: tuple[Rule, ...] = (
    Rename("wte.weight", "embed.weight"),
    Rename("h.{i}.ln_1.*", "layers.{i}.attn_norm.*"),
    Rename("h.{i}.attn.q_proj.*", "layers.{i}.attn.q.*"),
    Rename("h.{i}.attn.k_proj.*", "layers.{i}.attn.k.*"),
    Rename("h.{i}.attn.v_proj.*", "layers.{i}.attn.v.*"),
    Rename("h.{i}.attn.out_proj.*", "layers.{i}.attn.out.*"),
    Rename("h.{i}.mlp.fc_in.*", "layers.{i}.mlp.up.*"),
    Rename("h.{i}.mlp.fc_out.*", "layers.{i}.mlp.down.*"),
    Rename("ln_f.*", "final_norm.*"),
)

PARTS = {
    "lm": Part(
        (
            Tied("lm_head.weight", to="wte.weight", when=tied),
            Rename("lm_head.weight", "weight", when=untied),
            Rename("lm_head.bias", "bias"),
        )
    ),
    "score": Part((Rename("score.*", "*"),)),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}

TASKS = {
    "base": Task("GPTJModel", prefix=""),
    "causal-lm": Task("GPTJForCausalLM", {"lm": "head."}),
    "sequence-classification": Task("GPTJForSequenceClassification", {"score": "head."}),
    "question-answering": Task("GPTJForQuestionAnswering", {"qa": "head."}, labels=2),
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
        "rotary_dim": "rotary_dim",
        "layer_norm_epsilon": "norm_eps",
        "resid_pdrop": "dropout",
        "embd_pdrop": "embedding_dropout",
        "attn_pdrop": "attention_dropout",
        "initializer_range": "initializer_range",
    },
    # Every GPT-J is rotary and divides scores by the square root of head_dim.
    required={"rotary": (True,), "scale_attn_weights": (True,)},
    ignored=frozenset(
        """n_ctx pad_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj""".split()
    ),
)

ARCH = ArchMap(
    model_type="gptj",
    prefix="transformer.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=(r"h\.\d+\.attn\.((masked_)?bias|embed_positions)",),
)
