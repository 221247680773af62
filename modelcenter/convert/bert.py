"""BERT's checkpoints: rules and config of transformers' `bert` models.

Files exist with and without the prefix `bert.`; old ones call the weight and bias of a LayerNorm gamma and beta, and
hold the buffer `position_ids`. The decoder of the masked-LM head is the word embedding, and its bias is
`cls.predictions.bias`; a file holds them once, but old files may repeat them under `cls.predictions.decoder`. With
`tie_word_embeddings` off, the decoder has its own weight and bias, and transformers also writes an unused
`cls.predictions.bias`.
"""

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import (
    CROSS_ATTENTION,
    ArchMap,
    Part,
    Rename,
    Rule,
    Task,
    Tied,
    tied,
    untied,
    with_cross_attention,
    with_embedding,
)

BODY: tuple[Rule, ...] = (
    Rename("embeddings.word_embeddings.weight", "embed.weight"),
    Rename("embeddings.position_embeddings.weight", "position.weight"),
    Rename("embeddings.token_type_embeddings.weight", "token_type.weight"),
    Rename("embeddings.LayerNorm.*", "embed_norm.*"),
    Rename("encoder.layer.{i}.attention.self.query.*", "layers.{i}.attn.q.*"),
    Rename("encoder.layer.{i}.attention.self.key.*", "layers.{i}.attn.k.*"),
    Rename("encoder.layer.{i}.attention.self.value.*", "layers.{i}.attn.v.*"),
    Rename("encoder.layer.{i}.attention.output.dense.*", "layers.{i}.attn.out.*"),
    Rename("encoder.layer.{i}.attention.output.LayerNorm.*", "layers.{i}.attn_norm.*"),
    Rename("encoder.layer.{i}.intermediate.dense.*", "layers.{i}.mlp.up.*"),
    Rename("encoder.layer.{i}.output.dense.*", "layers.{i}.mlp.down.*"),
    Rename("encoder.layer.{i}.output.LayerNorm.*", "layers.{i}.mlp_norm.*"),
)


def masked_lm(head: str, dense: str, norm: str) -> Part:
    """The masked-LM head with this name, whose dense layer and norm have these names in it."""
    return Part(
        (
            Rename(f"{head}.{dense}.*", "dense.*"),
            Rename(f"{head}.{norm}.*", "norm.*"),
            Rename(f"{head}.bias", "bias", when=tied),
            Tied(f"{head}.decoder.weight", to="embeddings.word_embeddings.weight", when=tied),
            Tied(f"{head}.decoder.bias", to=f"{head}.bias", when=tied),
            Rename(f"{head}.decoder.weight", "weight", when=untied),
            Rename(f"{head}.decoder.bias", "bias", when=untied),
            Tied(f"{head}.bias", to=f"{head}.decoder.bias", compare=False, write=True, when=untied),
        )
    )


_CROSS = "encoder.layer.{i}.crossattention"
PARTS = {
    CROSS_ATTENTION: Part(
        (
            Rename(f"{_CROSS}.self.query.*", "layers.{i}.cross.q.*"),
            Rename(f"{_CROSS}.self.key.*", "layers.{i}.cross.k.*"),
            Rename(f"{_CROSS}.self.value.*", "layers.{i}.cross.v.*"),
            Rename(f"{_CROSS}.output.dense.*", "layers.{i}.cross.out.*"),
            Rename(f"{_CROSS}.output.LayerNorm.*", "layers.{i}.cross_norm.*"),
        ),
        prefixed=True,
    ),
    "pooler": Part((Rename("pooler.dense.*", "*"),), prefixed=True),
    "lm": masked_lm("cls.predictions", "transform.dense", "transform.LayerNorm"),
    "nsp": Part((Rename("cls.seq_relationship.*", "*"),)),
    # Three heads with the same name; `architectures` tells which one a file holds.
    "classifier": Part((Rename("classifier.*", "*"),)),
    "token classifier": Part((Rename("classifier.*", "*"),)),
    "choice": Part((Rename("classifier.*", "*"),)),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}

TASKS = {
    "base": Task("BertModel", {"pooler": "pooler."}, prefix=""),
    "masked-lm": Task("BertForMaskedLM", {"lm": "head."}),
    "causal-lm": Task("BertLMHeadModel", {"lm": "head."}),
    "pretraining": Task("BertForPreTraining", {"pooler": "pooler.", "lm": "head.lm.", "nsp": "head.nsp."}),
    "sequence-classification": Task("BertForSequenceClassification", {"pooler": "pooler.", "classifier": "head."}),
    "token-classification": Task("BertForTokenClassification", {"token classifier": "head."}),
    "next-sentence-prediction": Task("BertForNextSentencePrediction", {"pooler": "pooler.", "nsp": "head."}),
    "question-answering": Task("BertForQuestionAnswering", {"qa": "head."}, labels=2),
    "multiple-choice": Task("BertForMultipleChoice", {"pooler": "pooler.", "choice": "head."}),
}

# Also for ALBERT and DeBERTa.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "hidden_act": "hidden_act",
    "max_position_embeddings": "max_positions",
    "type_vocab_size": "type_vocab_size",
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "pad_token_id": "pad_token_id",
    "initializer_range": "initializer_range",
}
CONFIG = ConfigMap(
    fields={
        **FIELDS,
        "classifier_dropout": "classifier_dropout",
        "is_decoder": "is_decoder",
        "add_cross_attention": "cross_attention",
    },
    # BertStyleConfig checks that is_causal is what is_decoder says.
    required={"is_causal": (True, False, None), "position_embedding_type": ("absolute",)},
    # embedding_size belongs to ELECTRA, emb_size to TinyBERT's search: transformers' BERT has a single width.
    ignored=frozenset(
        """directionality emb_size embedding_size pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
        pooler_size_per_head pooler_type""".split()
    ),
)

IGNORE = (r"embeddings\.position_ids", r"embeddings\.token_type_ids")
OLD_SPELLINGS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))

ARCH = ArchMap(
    model_type="bert",
    prefix="bert.",
    body=BODY,
    parts=PARTS,
    tasks=with_cross_attention(with_embedding(TASKS)),
    config=CONFIG,
    ignore=IGNORE,
    old_spellings=OLD_SPELLINGS,
)
