"""Flags of extractive question answering. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.training.config.checks import check_not_negative, check_positive
from modelcenter.training.config.teacher import TaughtConfig

_data, _answers = partial(flag, "data"), partial(flag, "answers")
SCORINGS = ("auto", "squad", "cmrc")
WRONG_ANSWERS = ("drop", "error")


# fmt: off
@dataclass(kw_only=True)
class QAConfig(TaughtConfig):
    """Flags of extractive question answering."""

    task: ClassVar[str] = "qa"
    roles: ClassVar[tuple[str, ...]] = ("question", "context", "answers")
    idle: ClassVar[Mapping[str, Idle]] = {
        **TaughtConfig.idle,
        "null_threshold": Idle(lambda c: c.no_answer is False, "with no_answer false, as all questions are answered; "
            "leave one out"),
    }

    question_column: str | None = _data(None, "column with the question; detected if not given", "question_column_name")
    context_column: str | None = _data(None, "column with the text that contains the answer; detected if not given",
        "context_column_name")
    answers_column: str | None = _data(None, "column with the answers, as texts and their start positions; detected if "
        "not given", "answer_column_name")
    doc_stride: int = _data(128, "number of tokens by which neighbouring windows of a long context overlap")
    max_question_length: int = _data(64, "maximum tokens of a question; longer questions are cut", "max_query_length")
    wrong_answers: str = _data("drop", "what to do with training rows whose answer is not in the context: drop them "
        "and report how many, or stop with an error", choices=WRONG_ANSWERS)

    no_answer: bool | None = _answers(None, "whether questions may have no answer; if not given, true if some training "
        "rows have none", "version_2_with_negative")
    null_threshold: float = _answers(0.0, "by how much `no answer` must outscore the best answer to be chosen",
        "null_score_diff_threshold")
    max_answer_length: int = _answers(30, "maximum tokens of an answer")
    n_best: int = _answers(20, "number of answer candidates over which probabilities are computed", "n_best_size")
    scoring: str = _answers("auto", "exact match and F1 over words as in SQuAD, or over characters as in CMRC; auto: "
        "by the script of the contexts", choices=SCORINGS)
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "max_question_length", "max_answer_length", "n_best")
        check_not_negative(self, "doc_stride")
