"""Extractive question answering: finding the part of a text that answers a question, if there is one."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.data.table import Table
from modelcenter.data.tokenization.passages import TokenizedPassages, find_answers, tokenize_passages
from modelcenter.models.base import Model
from modelcenter.models.outputs import ModelOutput
from modelcenter.training.config import QAConfig, TrainConfig
from modelcenter.training.metrics import ExtractiveAnswers
from modelcenter.training.metrics.qa import is_han
from modelcenter.training.tasks.answer_spans import Answer, WindowSpans, best_answer, best_spans
from modelcenter.training.tasks.column_roles import inference_columns
from modelcenter.training.tasks.preview import shortened
from modelcenter.training.tasks.questions import NO_ANSWER, Questions, find_question_columns, read_questions
from modelcenter.training.tasks.splits import read_splits
from modelcenter.training.tasks.windows import WindowExamples, WindowTask


@dataclass(frozen=True)
class QuestionWindows(WindowExamples):
    """Windows of the contexts of questions. first, last: int64 (windows,), the first and last token of the answer."""

    questions: Questions
    passages: TokenizedPassages
    first: np.ndarray | None = None
    last: np.ndarray | None = None

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        batch = super().batch(rows)
        if self.first is not None and self.last is not None:
            batch["start_positions"] = torch.from_numpy(self.first[rows])
            batch["end_positions"] = torch.from_numpy(self.last[rows])
        return batch

    def show(self, row: int, tokenizer: Any) -> str:
        ids = self.tokens.row(row)
        answer = "no answer here"
        if self.first is not None and self.last is not None and self.first[row]:
            answer = tokenizer.decode(ids[self.first[row] : self.last[row] + 1])
        return f"[{shortened(answer, 60)}] {shortened(tokenizer.decode(ids))}"


@dataclass(frozen=True)
class AnswerSettings:
    """How contexts are split into windows, and answers chosen and judged.

    null_threshold: see answer_spans.best_answer. scoring: style of ExtractiveAnswers.
    """

    doc_stride: int
    max_question_length: int
    n_best: int
    max_answer_length: int
    null_threshold: float | None
    scoring: str

    @classmethod
    def from_flags(cls, flags: Any, run: Any, contexts: list[str]) -> Self:
        """The settings in the flags, else those of the run that trained the model, else the defaults. contexts: used to
        resolve the scoring "auto"."""
        usual = QAConfig() if run is None else run

        def value(name: str) -> Any:
            given = getattr(flags, name, None)
            return getattr(usual, name) if given is None else given

        scoring = value("scoring")
        return cls(
            doc_stride=usual.doc_stride,
            max_question_length=usual.max_question_length,
            n_best=value("n_best"),
            max_answer_length=value("max_answer_length"),
            null_threshold=value("null_threshold") if value("no_answer") else None,
            scoring=("cmrc" if _is_chinese(contexts) else "squad") if scoring == "auto" else scoring,
        )


class AnswerScores:
    """The metrics of the predicted answers and, if questions may have none, the best ones at any other threshold."""

    main = ExtractiveAnswers.main

    def __init__(self, scoring: str, no_answer: bool):
        self.given = ExtractiveAnswers(scoring)
        self.best_texts = ExtractiveAnswers(scoring) if no_answer else None

    def add(self, answer: Answer, true: list[str]) -> None:
        self.given.update([answer.text], [true])
        if self.best_texts is not None:
            self.best_texts.update([answer.best_text], [true], [answer.null])

    def result(self) -> dict[str, float | None]:
        result = self.given.result()
        if self.best_texts is not None:
            result |= {name: v for name, v in self.best_texts.result().items() if name.startswith("best_")}
        return result


@dataclass(eq=False, kw_only=True, repr=False)
class QuestionAnswering(WindowTask):
    """Extractive question answering. Flags: QAConfig.

    Attributes:
        table: rows for training or inference. columns: of question, context and answers. left_out: a description of the
            training rows that were left out.
    """

    name: ClassVar[str] = "qa"
    head: ClassVar[str] = "question-answering"
    table: Table
    columns: tuple[str, str, str | None]
    questions: Questions
    settings: AnswerSettings
    eval_table: Table | None = None
    eval_questions: Questions | None = None
    left_out: str = ""

    @classmethod
    def from_flags(cls, cfg: QAConfig) -> Self:
        """See Task; each answer is searched for in its context.

        Raises:
            ValueError: also if answers are not in their contexts and wrong_answers is "error", or all of them are not.
        """
        table, eval_table = read_splits(cfg)
        columns = find_question_columns(table, cfg.question_column, cfg.context_column, cfg.answers_column)
        cfg.question_column, cfg.context_column, cfg.answers_column = columns
        questions, left_out = read_questions(table, *columns), ""
        if questions.wrong:
            left_out = _describe_wrong(table, questions, cfg.wrong_answers)
            wrong = set(questions.wrong)
            table = table.take(np.array([i for i in range(len(table)) if i not in wrong]))
            questions = read_questions(table, *columns)
        if cfg.no_answer is None:
            cfg.no_answer = NO_ANSWER in questions.starts
        if not cfg.no_answer and NO_ANSWER in questions.starts:
            row = questions.starts.index(NO_ANSWER)
            raise ValueError(f"no_answer: got false, but the question at {table.where(row)} has no answer")
        cfg.refuse_idle(
            "null_threshold",
            not cfg.no_answer,
            "because all questions have answers; leave it out, or give no_answer true",
        )
        eval_questions = None
        if eval_table is not None:
            find_question_columns(eval_table, *columns)
            eval_questions = read_questions(eval_table, *columns)
        return cls(
            table=table,
            columns=columns,
            questions=questions,
            settings=AnswerSettings.from_flags(cfg, cfg, questions.contexts),
            eval_table=eval_table,
            eval_questions=eval_questions,
            left_out=left_out,
        )

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[QuestionWindows, QuestionWindows | None]:
        train_set = self._windows(self.table, self.questions, tokenizer, max_length)
        if self.eval_table is None or self.eval_questions is None:
            return train_set, None
        return train_set, self._windows(self.eval_table, self.eval_questions, tokenizer, max_length)

    def _windows(self, table: Table, questions: Questions, tokenizer: Any, max_length: int) -> QuestionWindows:
        passages = tokenize_passages(
            tokenizer,
            questions.questions,
            questions.contexts,
            where=table.where,
            max_length=max_length,
            doc_stride=self.settings.doc_stride,
            max_question_length=self.settings.max_question_length,
        )
        places = () if questions.answers is None else find_answers(passages, questions.starts, questions.ends)
        return QuestionWindows(table, passages.tokens, passages.owner, questions, passages, *places)

    def metrics(self, device: torch.device | str = "cpu") -> ExtractiveAnswers:
        return ExtractiveAnswers(self.settings.scoring)

    def metric_names(self, examples: Any) -> list[str]:
        """Metrics of questions without an answer are included only if `examples` have such questions; thresholds never,
        because they say nothing about a model's quality."""
        rank_rows = range(engine.rank(), self.count_rows(examples), engine.world_size())
        result = self.score(examples, {row: [] for row in rank_rows}).result()
        return ["loss", *(name for name in result if not name.endswith("_threshold"))]

    def length_limit(self, max_length: int) -> str:
        """The limit of questions; a long context is split into windows."""
        return f"max_question_length {self.settings.max_question_length}"

    def describe_columns(self) -> str:
        question, context, answers = self.columns
        moved = f"; {self.questions.moved} answers found at other positions than given" if self.questions.moved else ""
        none = self.questions.starts.count(NO_ANSWER)
        without = f", {none:,} of them without an answer" if none else ""
        return (
            f"windows of {len(self.questions.questions):,} questions{without}; question {question!r}, "
            f"context {context!r}, answers {answers!r}{moved}{self.left_out}"
        )

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        given = inference_columns(cfg, run, table, QAConfig.roles, needed="question")
        if not labelled:
            given["answers"] = None
        columns = find_question_columns(table, **given, labelled=labelled)
        questions = read_questions(table, *columns)
        if run is None and labelled:
            run = QAConfig(no_answer=NO_ANSWER in questions.starts)
        settings = AnswerSettings.from_flags(cfg, run, questions.contexts)
        return cls(table=table, columns=columns, questions=questions, settings=settings)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> QuestionWindows:
        return self._windows(self.table, self.questions, tokenizer, max_length)

    def window_results(self, examples: QuestionWindows, windows: np.ndarray, out: ModelOutput) -> list[WindowSpans]:
        passages, n_best, longest = examples.passages, self.settings.n_best, self.settings.max_answer_length
        lengths = passages.tokens.lengths[windows].tolist()
        starts, ends = (logits[0].float().cpu().split(lengths) for logits in (out.start_logits, out.end_logits))
        return [
            best_spans(a, b, passages.chars_of(w), int(passages.inside[w, 0]), n_best, longest)
            for w, a, b in zip(windows.tolist(), starts, ends, strict=True)
        ]

    def _answer(self, examples: QuestionWindows, question: int, spans: list[WindowSpans]) -> Answer:
        context = examples.questions.contexts[question]
        return best_answer(context, spans, self.settings.n_best, self.settings.null_threshold)

    def score(self, examples: QuestionWindows, results: dict[int, list[Any]]) -> AnswerScores:
        scores = AnswerScores(self.settings.scoring, self.settings.null_threshold is not None)
        assert examples.questions.answers is not None
        for question, spans in results.items():
            scores.add(self._answer(examples, question, spans), examples.questions.answers[question])
        return scores

    def prediction(self, examples: QuestionWindows, row: int, results: list[Any]) -> dict[str, Any]:
        """id (if the data have it), answer, score, and its position in the context; no answer: "" and -1.

        If questions may have no answer, also null_score: the score of "no answer" minus that of the best text.
        """
        answer = self._answer(examples, row, results)
        names = examples.table.columns
        line: dict[str, Any] = {"id": names["id"][row]} if "id" in names else {}
        line |= {"answer": answer.text, "score": round(answer.score, 6), "start": answer.start, "end": answer.end}
        return line if self.settings.null_threshold is None else {**line, "null_score": round(answer.null, 6)}

    def count_rows(self, examples: Any) -> int:
        return len(examples.questions.questions)


def _describe_wrong(table: Table, questions: Questions, wrong_answers: str) -> str:
    """A description of the rows that are left out because their context does not contain the answer.

    Raises:
        ValueError: wrong_answers is "error", or no other row is left.
    """
    count, first = len(questions.wrong), table.where(min(questions.wrong))
    rows = f"{count} rows have answers that are not in their context, the first at {first}"
    if wrong_answers == "error" or count == len(table):
        fix = "; wrong_answers drop leaves them out" if count < len(table) else ""
        raise ValueError(f"{table.name}: {rows}{fix}")
    return f"; left out: {rows}"


def _is_chinese(contexts: list[str]) -> bool:
    """Whether contexts are mostly written in Chinese."""
    sample = "".join(context[:200] for context in contexts[:100])
    return 2 * sum(map(is_han, sample)) > sum(not c.isspace() for c in sample)
