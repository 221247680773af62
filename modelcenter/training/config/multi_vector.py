"""Flags of models with one vector per token. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.multi_vector_settings import SCORES
from modelcenter.training.config.checks import check_not_negative, check_positive
from modelcenter.training.config.common import TrainConfig

VECTOR_LOSSES = ("in_batch", "kl", "margin_mse")
NOTHING = ["nothing"]  # of skipped
_data, _model, _optimisation = partial(flag, "data"), partial(flag, "model"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class MultiVectorConfig(TrainConfig):
    """Flags of models with one vector per token. A row counts once in batch_size, with all its texts."""

    task: ClassVar[str] = "multi-vector"
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("anchor", "positive", "negative", "score")
    idle: ClassVar[Mapping[str, Idle]] = {
        **TrainConfig.idle,
        "label_smoothing": Idle(lambda c: True, "with embeddings, which have no labels; leave it out"),
        "attend_to_expansion": Idle(lambda c: c.expansion == 0, "where queries are not expanded; leave it out"),
    }

    anchor_column: str | None = _data(None, "column with the query, such as a question; detected by its usual names if "
        "not given", "query_column")
    positive_column: str | None = _data(None, "column with the document that answers it, or a list of them, of which "
        "each epoch uses one; with score_column, the list of documents that were scored; detected by its usual names "
        "if not given", "document_column")
    negative_column: str | None = _data(None, "column with a document that does not answer it, or a list of them, or "
        "several comma-separated columns; detected, if there is one, if not given", "negative_columns")
    score_column: str | None = _data(None, "column with a list of a teacher's scores, one for each document of the "
        "row, positives first; if not given, detected in data without a column of negatives", "label_column")
    max_negatives: int | None = _data(None, "number of negatives used per row; rows with more use them in turn, epoch "
        "by epoch; all if not given")
    query_prompt: str | None = _data(None, "text put before each query; if not given, the model's, else the token "
        "[unused0] if the vocabulary has it, else '[Q] '")
    document_prompt: str | None = _data(None, "text put before each document; if not given, the model's, else the "
        "token [unused1] if the vocabulary has it, else '[D] '")
    document_length: int | None = _data(None, "maximum number of tokens of a document, within max_length; if not "
        "given, the model's, else 180")

    width: int | None = _model(None, "size of a vector, for a model without a projection; 128 if not given",
        "embedding_size")
    expansion: int | None = _model(None, "number of tokens to which queries are filled with mask tokens or truncated; "
        "0: neither; if not given, the model's, else 32 if the tokenizer has a mask token", "query_length")
    attend_to_expansion: bool | None = _model(None, "whether the words of a query attend to these mask tokens; if not "
        "given, the model's setting, else not")
    skipped: list[str] | None = _model(None, "words of documents that get no vector, or 'nothing'; if not given, the "
        "model's, else punctuation", "skiplist_words")
    similarity: str | None = _model(None, "score of a query and a document: maxsim, a sum over the query's vectors, or "
        "meanmaxsim, their mean; if not given, the model's, else maxsim", choices=SCORES)
    loss: str | None = _optimisation(None, "in_batch: find each query's document among all of the step; kl: match the "
        "distribution of a teacher's scores (score_column); margin_mse: match their differences; if not given, kl with "
        "score_column, else in_batch", choices=VECTOR_LOSSES)
    temperature: float | None = _optimisation(None, "divides the scores; lower: the hardest negatives count more; 1 if "
        "not given")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "temperature", "max_negatives", "width", "document_length")
        if self.expansion is not None:
            check_not_negative(self, "expansion")
