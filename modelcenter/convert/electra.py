"""ELECTRA's checkpoints: rules and config of transformers' `electra` models.

The body has BERT's names under `electra.`. Generators (masked language models) and discriminators have separate files.
Old files hold the buffer `position_ids`, and repeat the word embedding, to which the generator's head is tied, as
`generator_lm_head.weight`.
"""

from dataclasses import replace

from modelcenter.convert import bert
from modelcenter.convert.rules import (
    CROSS_ATTENTION,
    ArchMap,
    Part,
    Rename,
    Task,
    Tied,
    tied,
    untied,
    with_cross_attention,
    with_embedding,
)

PARTS = {
    **{name: bert.PARTS[name] for name in (CROSS_ATTENTION, "token classifier", "qa")},
    "lm": Part(
        (
            Rename("generator_predictions.dense.*", "dense.*"),
            Rename("generator_predictions.LayerNorm.*", "norm.*"),
            Rename("generator_lm_head.bias", "bias"),
            Tied("generator_lm_head.weight", to="embeddings.word_embeddings.weight", when=tied),
            Rename("generator_lm_head.weight", "weight", when=untied),
        )
    ),
    "replaced": Part(
        (
            Rename("discriminator_predictions.dense.*", "dense.*"),
            Rename("discriminator_predictions.dense_prediction.*", "*"),
        )
    ),
    "classifier": Part((Rename("classifier.dense.*", "dense.*"), Rename("classifier.out_proj.*", "*"))),
    "choice": Part((Rename("sequence_summary.summary.*", "dense.*"), Rename("classifier.*", "*"))),
}

TASKS = {
    "base": Task("ElectraModel", prefix=""),
    "masked-lm": Task("ElectraForMaskedLM", {"lm": "head."}),
    "causal-lm": Task("ElectraForCausalLM", {"lm": "head."}),
    "pretraining": Task("ElectraForPreTraining", {"replaced": "head."}),
    "sequence-classification": Task("ElectraForSequenceClassification", {"classifier": "head."}),
    "token-classification": Task("ElectraForTokenClassification", {"token classifier": "head."}),
    "question-answering": Task("ElectraForQuestionAnswering", {"qa": "head."}, labels=2),
    "multiple-choice": Task("ElectraForMultipleChoice", {"choice": "head."}),
}

CONFIG = replace(
    bert.CONFIG,
    fields={**bert.CONFIG.fields, "embedding_size": "embedding_size", "summary_last_dropout": "choice_dropout"},
    # Only multiple choice reads the summary_* fields, and the model checks them there. generator_size is a note in
    # pairs that were trained together.
    ignored=frozenset(
        """generator_size summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj""".split()
    ),
)

ARCH = ArchMap(
    model_type="electra",
    prefix="electra.",
    body=(*bert.BODY, Rename("embeddings_project.*", "project_in.*")),
    parts=PARTS,
    tasks=with_cross_attention(with_embedding(TASKS)),
    config=CONFIG,
    ignore=bert.IGNORE,
    old_spellings=bert.OLD_SPELLINGS,
)
