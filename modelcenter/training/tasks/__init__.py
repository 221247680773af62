"""The tasks that a model can be trained for, by name. Imports no torch: a task's module is imported when it is used.

base.py defines the interface of a task, examples.py what it trains on. Each task has its own module (classification.py,
qa.py, lm.py, ...; pretraining/). The others are shared: splits.py and column_roles.py choose the rows and columns;
questions.py, answer_examples.py, word_tags.py, related_examples.py, ranked_examples.py, vector_examples.py and
structured_examples.py interpret the rows; windows.py and answer_spans.py handle rows that are too long for the model;
class_weights.py; text_search.py searches by embeddings, vector_search.py by those of tokens; pair_scores.py scores with
rerankers; preview.py formats rows for display.
"""

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TaskInfo:
    """Where the parts of a task are.

    verb: the command line's, finetune or pretrain. script: in scripts/. config: the class of its flags, in
    training.config. implementation: module and class. heads: the model tasks (see modelcenter.from_pretrained) that it
    trains. families: the model_types that it is limited to, if these heads mean something else elsewhere; empty: any.
    """

    verb: str
    script: str
    config: str
    implementation: str
    heads: tuple[str, ...]
    families: tuple[str, ...] = ()

    def load(self) -> Any:
        """The class that implements the task."""
        module, name = self.implementation.split(":")
        return getattr(importlib.import_module(f"modelcenter.training.tasks.{module}"), name)

    def flags(self) -> Any:
        """The class of its flags."""
        return getattr(importlib.import_module("modelcenter.training.config"), self.config)

    def takes(self, family: str, heads: Collection[str]) -> bool:
        """Whether models of a family that has these heads can be trained for the task."""
        return (not self.families or family in self.families) and any(head in heads for head in self.heads)


# fmt: off
TASKS: dict[str, TaskInfo] = {
    "classification": TaskInfo("finetune", "finetune_classification", "ClassificationConfig",
        "classification:Classification", ("sequence-classification",)),
    "multiple-choice": TaskInfo("finetune", "finetune_multiple_choice", "MultipleChoiceConfig",
        "multiple_choice:MultipleChoice", ("multiple-choice",)),
    "embedding": TaskInfo("finetune", "finetune_embedding", "EmbeddingConfig",
        "embedding:Embedding", ("embedding",)),
    "multi-vector": TaskInfo("finetune", "finetune_multi_vector", "MultiVectorConfig",
        "multi_vector:MultiVector", ("multi-vector",)),
    "sparse-embedding": TaskInfo("finetune", "finetune_sparse_embedding", "SparseEmbeddingConfig",
        "sparse_embedding:SparseEmbedding", ("sparse-embedding",)),
    "reranking": TaskInfo("finetune", "finetune_reranking", "RerankingConfig",
        "reranking:Reranking", ("sequence-classification",)),
    "seq2seq": TaskInfo("finetune", "finetune_seq2seq", "Seq2SeqConfig",
        "seq2seq:SequenceToSequence", ("seq2seq-lm",)),
    "token-classification": TaskInfo("finetune", "finetune_token_classification", "TokenClassificationConfig",
        "token_classification:TokenClassification", ("token-classification",)),
    "qa": TaskInfo("finetune", "finetune_qa", "QAConfig",
        "qa:QuestionAnswering", ("question-answering",)),
    "lm": TaskInfo("finetune", "finetune_lm", "LMConfig",
        "lm:LanguageModelling", ("causal-lm",)),
    "dpo": TaskInfo("finetune", "finetune_dpo", "DPOConfig",
        "dpo:DPO", ("causal-lm",)),
    # Pretraining comes last: a model is used by the first task that its head is for.
    "replaced-tokens": TaskInfo("pretrain", "pretrain_replaced_tokens", "ReplacedTokensConfig",
        "pretraining.replaced:ReplacedTokenPretraining", ("pretraining",), ("deberta-v2", "electra")),
    "mlm": TaskInfo("pretrain", "pretrain_mlm", "MLMConfig",
        "pretraining.masked:MaskedPretraining", ("masked-lm", "pretraining")),
    "pretrain-lm": TaskInfo("pretrain", "pretrain_lm", "PretrainLMConfig",
        "pretraining.causal:CausalPretraining", ("causal-lm",)),
    "span-corruption": TaskInfo("pretrain", "pretrain_span_corruption", "SpanCorruptionConfig",
        "pretraining.span_corruption:SpanCorruptionPretraining", ("seq2seq-lm",)),
}
# fmt: on


def tasks_of(verb: str) -> dict[str, TaskInfo]:
    """The tasks of a verb by their names on the command line, where both verbs have a task called lm."""
    return {name.removeprefix(f"{verb}-"): info for name, info in TASKS.items() if info.verb == verb}


def task_of_head(family: str, head: str) -> str | None:
    """The task for models of a family with this head; None: there is none."""
    return next((name for name, info in TASKS.items() if info.takes(family, [head])), None)
