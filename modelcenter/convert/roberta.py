"""RoBERTa's and XLM-R's checkpoints: rules and config of transformers' `roberta` and `xlm-roberta` models.

The body has BERT's names under `roberta.`, in files of both. Old files hold the buffer `position_ids`, a pooler that no
head reads, and repeat the tied decoder under `lm_head.decoder`.
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
    """Of the family whose classes of transformers begin with `name`."""
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

XLM_ROBERTA = replace(
    ARCH,
    model_type="xlm-roberta",
    tasks=with_cross_attention(with_embedding(tasks("XLMRoberta"))),
)
