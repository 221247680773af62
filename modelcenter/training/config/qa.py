"""Flags of extractive question answering. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import flag
from modelcenter.training.config.checks import check_not_negative, check_positive
from modelcenter.training.config.common import TrainConfig

_data, _answers = partial(flag, "data"), partial(flag, "answers")
SCORINGS = ("auto", "squad", "cmrc")
WRONG_ANSWERS = ("drop", "error")


# fmt: off
@dataclass(kw_only=True)
class QAConfig(TrainConfig):
    """Flags of extractive question answering."""

    task: ClassVar[str] = "qa"
    roles: ClassVar[tuple[str, ...]] = ("question", "context", "answers")

    question_column: str | None = _data(None, "column of the question; none: found", "question_column_name")
    context_column: str | None = _data(None, "column of the text that holds the answer; none: found",
        "context_column_name")
    answers_column: str | None = _data(None, "column of the answers: texts and where they start; none: found",
        "answer_column_name")
    doc_stride: int = _data(128, "tokens that the windows of a long context share")
    max_question_length: int = _data(64, "tokens of a question, longer ones are cut", "max_query_length")
    wrong_answers: str = _data("drop", "training rows whose answer the context does not hold: drop and say how many, "
        "or an error", choices=WRONG_ANSWERS)

    no_answer: bool | None = _answers(None, "questions may have no answer; none: if some training rows have none",
        "version_2_with_negative")
    null_threshold: float = _answers(0.0, "how much better than any answer `no answer` must score to be given",
        "null_score_diff_threshold")
    max_answer_length: int = _answers(30, "tokens of an answer, at most")
    n_best: int = _answers(20, "answers that share the probability", "n_best_size")
    scoring: str = _answers("auto", "exact match and F1 as SQuAD's words or as CMRC's characters; auto: by the "
        "script of the contexts", choices=SCORINGS)
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "max_question_length", "max_answer_length", "n_best")
        check_not_negative(self, "doc_stride")
