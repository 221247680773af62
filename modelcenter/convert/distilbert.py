"""DistilBERT's checkpoints: rules and config of transformers' `distilbert` models.

Files exist with and without the prefix `distilbert.`. Old ones hold the buffer `position_ids`, and repeat the word
embedding, to which the masked-LM head is tied, as `vocab_projector.weight`.
"""

from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Task, Tied, tied, untied, with_embedding

BODY: tuple[Rule, ...] = (
    Rename("embeddings.word_embeddings.weight", "embed.weight"),
    Rename("embeddings.position_embeddings.weight", "position.weight"),
    Rename("embeddings.LayerNorm.*", "embed_norm.*"),
    Rename("transformer.layer.{i}.attention.q_lin.*", "layers.{i}.attn.q.*"),
    Rename("transformer.layer.{i}.attention.k_lin.*", "layers.{i}.attn.k.*"),
    Rename("transformer.layer.{i}.attention.v_lin.*", "layers.{i}.attn.v.*"),
    Rename("transformer.layer.{i}.attention.out_lin.*", "layers.{i}.attn.out.*"),
    Rename("transformer.layer.{i}.sa_layer_norm.*", "layers.{i}.attn_norm.*"),
    Rename("transformer.layer.{i}.ffn.lin1.*", "layers.{i}.mlp.up.*"),
    Rename("transformer.layer.{i}.ffn.lin2.*", "layers.{i}.mlp.down.*"),
    Rename("transformer.layer.{i}.output_layer_norm.*", "layers.{i}.mlp_norm.*"),
)

_DENSE = (Rename("pre_classifier.*", "dense.*"), Rename("classifier.*", "*"))

PARTS = {
    "lm": Part(
        (
            Rename("vocab_transform.*", "dense.*"),
            Rename("vocab_layer_norm.*", "norm.*"),
            Rename("vocab_projector.bias", "bias"),
            Tied("vocab_projector.weight", to="embeddings.word_embeddings.weight", when=tied),
            Rename("vocab_projector.weight", "weight", when=untied),
        )
    ),
    # Heads with the same name; `architectures` tells which one a file holds.
    "classifier": Part(_DENSE),
    "token classifier": Part((Rename("classifier.*", "*"),)),
    "choice": Part(_DENSE),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}

TASKS = {
    "base": Task("DistilBertModel", prefix=""),
    "masked-lm": Task("DistilBertForMaskedLM", {"lm": "head."}),
    "sequence-classification": Task("DistilBertForSequenceClassification", {"classifier": "head."}),
    "token-classification": Task("DistilBertForTokenClassification", {"token classifier": "head."}),
    "question-answering": Task("DistilBertForQuestionAnswering", {"qa": "head."}, labels=2),
    "multiple-choice": Task("DistilBertForMultipleChoice", {"choice": "head."}),
}

CONFIG = ConfigMap(
    fields={
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "n_layers": "num_layers",
        "n_heads": "num_heads",
        "hidden_dim": "intermediate_size",
        "activation": "hidden_act",
        "max_position_embeddings": "max_positions",
        "sinusoidal_pos_embds": "sinusoidal_positions",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "seq_classif_dropout": "classifier_dropout",
        "qa_dropout": "qa_dropout",
        "pad_token_id": "pad_token_id",
        "initializer_range": "initializer_range",
    },
    required=BIDIRECTIONAL,
    # The name of tie_word_embeddings in the first files, which no version reads.
    ignored=frozenset(("tie_weights_",)),
)

ARCH = ArchMap(
    model_type="distilbert",
    prefix="distilbert.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=(r"embeddings\.position_ids",),
)
