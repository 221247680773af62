"""GPT-NeoX's checkpoints: rules and config of transformers' `gpt_neox` models (Pythia's too).

Query, key and value of a head are next to each other in one tensor, head after head. The vocabulary's matrix is called
`embed_out` in files and `lm_head` in transformers' modules; a file may have either. Old files hold masks and
frequencies, which have no content.
"""

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rope import RopeFields
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Split, Task, Tied, tied, untied, with_embedding

BODY: tuple[Rule, ...] = (
    Rename("embed_in.weight", "embed.weight"),
    Rename("layers.{i}.input_layernorm.*", "layers.{i}.attn_norm.*"),
    Split(
        "layers.{i}.attention.query_key_value.*",
        ("layers.{i}.attn.q.*", "layers.{i}.attn.k.*", "layers.{i}.attn.v.*"),
        groups=lambda config: config.num_heads,
    ),
    Rename("layers.{i}.attention.dense.*", "layers.{i}.attn.out.*"),
    Rename("layers.{i}.post_attention_layernorm.*", "layers.{i}.mlp_norm.*"),
    Rename("layers.{i}.mlp.dense_h_to_4h.*", "layers.{i}.mlp.up.*"),
    Rename("layers.{i}.mlp.dense_4h_to_h.*", "layers.{i}.mlp.down.*"),
    Rename("final_layer_norm.*", "final_norm.*"),
)

PARTS = {
    "lm": Part(
        (
            Tied("embed_out.weight", to="embed_in.weight", when=tied),
            Tied("lm_head.weight", to="embed_in.weight", when=tied),
            Rename("embed_out.weight", "weight", aliases=("lm_head.weight",), in_model="lm_head.weight", when=untied),
        )
    ),
    "score": Part((Rename("score.*", "*"),)),
    "classifier": Part((Rename("classifier.*", "*"),)),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}

TASKS = {
    "base": Task("GPTNeoXModel", prefix=""),
    "causal-lm": Task("GPTNeoXForCausalLM", {"lm": "head."}),
    "sequence-classification": Task("GPTNeoXForSequenceClassification", {"score": "head."}),
    "token-classification": Task("GPTNeoXForTokenClassification", {"classifier": "head."}),
    "question-answering": Task("GPTNeoXForQuestionAnswering", {"qa": "head."}, labels=2),
}

CONFIG = ConfigMap(
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "intermediate_size",
        "hidden_act": "hidden_act",
        "max_position_embeddings": "max_positions",
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "rotary_fraction",
        "rope_scaling": "rope_scaling",
        "use_parallel_residual": "parallel_residual",
        "attention_bias": "attention_bias",
        "layer_norm_eps": "norm_eps",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "classifier_dropout": "classifier_dropout",
        "initializer_range": "initializer_range",
    },
    # The last four had no effect in any version: dropouts came later, under other names; num_steps is Polyglot's.
    ignored=frozenset(
        "pad_token_id attention_probs_dropout_prob hidden_dropout_prob type_vocab_size num_steps".split()
    ),
    translation=RopeFields({"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}),
)

ARCH = ArchMap(
    model_type="gpt_neox",
    prefix="gpt_neox.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=(r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)", r"rotary_emb\.inv_freq"),
)
