"""OPT's checkpoints: rules and config of transformers' `opt` models.

Body names begin with `model.decoder.`, or with `decoder.` in files of the bare model and in old ones. The oldest call
the last norm `layer_norm`, and hold the unused number `decoder.version`.
"""

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Task, Tied, tied, untied, with_embedding

BODY: tuple[Rule, ...] = (
    Rename("decoder.embed_tokens.weight", "embed.weight"),
    Rename("decoder.embed_positions.weight", "position.weight"),
    Rename("decoder.project_in.weight", "project_in.weight"),
    Rename("decoder.layers.{i}.self_attn.q_proj.*", "layers.{i}.attn.q.*"),
    Rename("decoder.layers.{i}.self_attn.k_proj.*", "layers.{i}.attn.k.*"),
    Rename("decoder.layers.{i}.self_attn.v_proj.*", "layers.{i}.attn.v.*"),
    Rename("decoder.layers.{i}.self_attn.out_proj.*", "layers.{i}.attn.out.*"),
    Rename("decoder.layers.{i}.self_attn_layer_norm.*", "layers.{i}.attn_norm.*"),
    Rename("decoder.layers.{i}.fc1.*", "layers.{i}.mlp.up.*"),
    Rename("decoder.layers.{i}.fc2.*", "layers.{i}.mlp.down.*"),
    Rename("decoder.layers.{i}.final_layer_norm.*", "layers.{i}.mlp_norm.*"),
    Rename("decoder.final_layer_norm.*", "final_norm.*"),
    Rename("decoder.project_out.weight", "project_out.weight"),
)

PARTS = {
    "lm": Part(
        (
            Tied("lm_head.weight", to="decoder.embed_tokens.weight", when=tied),
            Rename("lm_head.weight", "weight", when=untied),
        )
    ),
    "score": Part((Rename("score.*", "*"),)),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}

TASKS = {
    "base": Task("OPTModel", prefix=""),
    "causal-lm": Task("OPTForCausalLM", {"lm": "head."}),
    "sequence-classification": Task("OPTForSequenceClassification", {"score": "head."}),
    "question-answering": Task("OPTForQuestionAnswering", {"qa": "head."}, labels=2),
}

CONFIG = ConfigMap(
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "ffn_dim": "intermediate_size",
        "word_embed_proj_dim": "embedding_size",
        "activation_function": "hidden_act",
        "max_position_embeddings": "max_positions",
        "do_layer_norm_before": "pre_norm",
        "_remove_final_layer_norm": "remove_final_norm",
        "enable_bias": "bias",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "pad_token_id": "pad_token_id",
        "init_std": "initializer_range",
    },
    required={
        "layerdrop": (0.0,),
        "layer_norm_elementwise_affine": (True,),
        "activation_dropout": (0.0,),
        "learned_embeddings": (True,),
        "scale_embeddings": (False,),
    },
)

ARCH = ArchMap(
    model_type="opt",
    prefix="model.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=(r"decoder\.version",),
    old_spellings=((r"^((?:model\.)?decoder\.)layer_norm\.", r"\1final_layer_norm."),),
)
