"""Checkpoints of RoBERTa, XLM-R, CamemBERT and data2vec's text encoder: rules and config of transformers' `roberta`,
`xlm-roberta`, `camembert` and `data2vec-text` models.

The body has BERT's names, with the prefix `data2vec_text.` in files of the last and `roberta.` in those of the others.
Old files hold the buffer `position_ids` and a pooler that no head reads, and repeat the tied decoder under
`lm_head.decoder`.
"""

from collections.abc import Mapping
from dataclasses import replace

from modelcenter.convert.bert import BODY, CONFIG, IGNORE, OLD_SPELLINGS, PARTS, masked_lm
from modelcenter.convert.rules import CROSS_ATTENTION, ArchMap, Part, Rename, Task, with_cross_attention, with_embedding

HEADS: Mapping[str, Part] = {
    **{name: PARTS[name] for name in (CROSS_ATTENTION, "pooler", "token classifier", "choice", "qa")},
    "lm": masked_lm("lm_head", "dense", "layer_norm"),
    "classifier": Part((Rename("classifier.dense.*", "dense.*"), Rename("classifier.out_proj.*", "*"))),
}


def tasks(name: str) -> dict[str, Task]:
    """The tasks of the family whose transformers classes begin with `name`."""
    return {
        "base": Task(f"{name}Model", {"pooler": "pooler."}, prefix=""),
        "masked-lm": Task(f"{name}ForMaskedLM", {"lm": "head."}),
        "causal-lm": Task(f"{name}ForCausalLM", {"lm": "head."}),
        "sequence-classification": Task(f"{name}ForSequenceClassification", {"classifier": "head."}),
        "token-classification": Task(f"{name}ForTokenClassification", {"token classifier": "head."}),
        "question-answering": Task(f"{name}ForQuestionAnswering", {"qa": "head."}, labels=2),
        "multiple-choice": Task(f"{name}ForMultipleChoice", {"pooler": "pooler.", "choice": "head."}),
    }


ARCH = ArchMap(
    model_type="roberta",
    prefix="roberta.",
    body=BODY,
    parts=HEADS,
    tasks=with_cross_attention(with_embedding(tasks("Roberta"))),
    config=replace(CONFIG, ignored=frozenset()),
    ignore=IGNORE,
    old_spellings=OLD_SPELLINGS,
)


def _named(model_type: str, name: str, prefix: str = ARCH.prefix) -> ArchMap:
    """RoBERTa under another model_type. name: prefix of its classes in transformers."""
    named = with_cross_attention(with_embedding(tasks(name)))
    return replace(ARCH, model_type=model_type, prefix=prefix, tasks=named)


XLM_ROBERTA = _named("xlm-roberta", "XLMRoberta")
CAMEMBERT = _named("camembert", "Camembert")
DATA2VEC_TEXT = _named("data2vec-text", "Data2VecText", "data2vec_text.")
