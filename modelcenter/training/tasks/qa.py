"""Extractive question answering: the part of a text that answers a question, or that none does."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.data.readers.literals import parse_list, parse_object
from modelcenter.data.table import Table
from modelcenter.data.tokenization.passages import TokenizedPassages, find_answers, tokenize_passages
from modelcenter.models.base import Model
from modelcenter.models.outputs import ModelOutput
from modelcenter.training.config import QAConfig, TrainConfig
from modelcenter.training.metrics import ExtractiveAnswers
from modelcenter.training.metrics.qa import is_han
from modelcenter.training.tasks.answer_spans import Answer, WindowSpans, best_answer, best_spans
from modelcenter.training.tasks.base import inference_columns, read_splits, shortened, strings
from modelcenter.training.tasks.named_columns import find_named
from modelcenter.training.tasks.windows import WindowExamples, WindowTask

QUESTIONS = ("question", "query", "question_text")
CONTEXTS = ("context", "passage", "document", "paragraph", "context_text")
ANSWERS = ("answers", "answer")
_START = "answer_start"
UNKNOWN = -2  # start of an answer that the context does not hold where it should


@dataclass(frozen=True)
class Asked:
    """Questions with their true answers.

    answers: texts of each question; none: it has no answer. None: nobody knows them. starts, ends: the characters of
    the first answer; start -1: there is none, UNKNOWN: it is not to be found. wrong: such questions. moved: how many
    were found elsewhere.
    """

    questions: list[str]
    contexts: list[str]
    answers: list[list[str]] | None = None
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    moved: int = 0


@dataclass(frozen=True)
class QuestionWindows(WindowExamples):
    """Windows of the contexts of questions, with the places of the answers."""

    asked: Asked
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
        found = "no answer here"
        if self.first is not None and self.last is not None and self.first[row]:
            found = tokenizer.decode(ids[self.first[row] : self.last[row] + 1])
        return f"[{shortened(found, 60)}] {shortened(tokenizer.decode(ids))}"


class Judged:
    """The score of the answers that are given; where questions may have none, with the best that another threshold
    would reach."""

    main = ExtractiveAnswers.main

    def __init__(self, scoring: str, no_answer: bool):
        self.given = ExtractiveAnswers(scoring)
        self.texts = ExtractiveAnswers(scoring) if no_answer else None

    def add(self, answer: Answer, true: list[str]) -> None:
        self.given.update([answer.text], [true])
        if self.texts is not None:
            self.texts.update([answer.best_text], [true], [answer.null])

    def result(self) -> dict[str, float | None]:
        found = self.given.result()
        if self.texts is not None:
            found |= {name: value for name, value in self.texts.result().items() if name.startswith("best_")}
        return found


class QuestionAnswering(WindowTask):
    """Extractive question answering. Flags: QAConfig."""

    name: ClassVar[str] = "qa"
    head: ClassVar[str] = "question-answering"

    def __init__(self, cfg: QAConfig):
        """Read the data, find its columns, look for each answer in its context.

        Raises:
            ValueError: no such data or columns; rows without question, context or answers; answers that the context
                does not hold, if wrong_answers says so or all are wrong.
        """
        self.train, self.eval = read_splits(cfg)
        columns = find_qa(self.train, cfg.question_column, cfg.context_column, cfg.answers_column)
        cfg.question_column, cfg.context_column, cfg.answers_column = self.columns = columns
        self.asked = questions_of(self.train, *columns)
        self.dropped = ""
        if self.asked.wrong:
            self._drop_wrong(cfg)
        if cfg.no_answer is None:
            cfg.no_answer = -1 in self.asked.starts
        if not cfg.no_answer and -1 in self.asked.starts:
            row = self.asked.starts.index(-1)
            raise ValueError(f"no_answer: got false, but the question at {self.train.where(row)} has no answer")
        self.eval_asked = None
        if self.eval is not None:
            find_qa(self.eval, *columns)
            self.eval_asked = questions_of(self.eval, *columns)
        self._settle(cfg, cfg)

    def _settle(self, flags: Any, run: Any) -> None:
        """Take the flags that say how answers are chosen and judged: those given now, else the run's, else defaults."""
        usual = QAConfig() if run is None else run

        def value(name: str) -> Any:
            given = getattr(flags, name, None)
            return getattr(usual, name) if given is None else given

        self.windows = {name: getattr(usual, name) for name in ("doc_stride", "max_question_length")}
        self.n_best, self.longest = value("n_best"), value("max_answer_length")
        self.null_threshold = value("null_threshold") if value("no_answer") else None
        scoring = value("scoring")
        self.scoring = ("cmrc" if _chinese(self.asked.contexts) else "squad") if scoring == "auto" else scoring

    def _drop_wrong(self, cfg: QAConfig) -> None:
        """Leave out the training rows whose answer is not in the context."""
        wrong = set(self.asked.wrong)
        place = self.train.where(min(wrong))
        said = f"{len(wrong)} rows have answers that their context does not hold, the first at {place}"
        if cfg.wrong_answers == "error" or len(wrong) == len(self.train):
            fix = "; wrong_answers drop leaves them out" if len(wrong) < len(self.train) else ""
            raise ValueError(f"{self.train.name}: {said}{fix}")
        self.train = self.train.take(np.array([i for i in range(len(self.train)) if i not in wrong]))
        self.asked = questions_of(self.train, *self.columns)
        self.dropped = f"; left out: {said}"

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[QuestionWindows, QuestionWindows | None]:
        train = self._windows(self.train, self.asked, tokenizer, max_length)
        if self.eval is None or self.eval_asked is None:
            return train, None
        return train, self._windows(self.eval, self.eval_asked, tokenizer, max_length)

    def _windows(self, table: Table, asked: Asked, tokenizer: Any, max_length: int) -> QuestionWindows:
        sizes: Any = {"max_length": max_length, **self.windows}
        passages = tokenize_passages(tokenizer, asked.questions, asked.contexts, where=table.where, **sizes)
        places = () if asked.answers is None else find_answers(passages, asked.starts, asked.ends)
        return QuestionWindows(table, passages.tokens, passages.owner, asked, passages, *places)

    def metrics(self, device: torch.device | str = "cpu") -> ExtractiveAnswers:
        return ExtractiveAnswers(self.scoring)

    def metric_names(self, examples: Any) -> list[str]:
        """Some are of rows without an answer, and there only if `examples` have such. A threshold judges no model."""
        mine = range(engine.rank(), self.count(examples), engine.world_size())
        found = self.judge(examples, {row: [] for row in mine}).result()
        return ["loss", *(name for name in found if not name.endswith("_threshold"))]

    def about_columns(self) -> str:
        question, context, answers = self.columns
        moved = f"; {self.asked.moved} answers found elsewhere than said" if self.asked.moved else ""
        none = self.asked.starts.count(-1)
        without = f", {none:,} of them without an answer" if none else ""
        return (
            f"windows of {len(self.asked.questions):,} questions{without}; question {question!r}, context {context!r}, "
            f"answers {answers!r}{moved}{self.dropped}"
        )

    # -- use of a trained model --------------------------------------------------------------------------------------

    @classmethod
    def to_use(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        task = cls.__new__(cls)
        given = inference_columns(cfg, run, table, QAConfig.roles, needed="question")
        if not labelled:
            given["answers"] = None
        task.train, task.eval = table, None
        task.columns = find_qa(table, **given, answered=labelled)
        task.asked = questions_of(table, *task.columns)
        if run is None and labelled:
            run = QAConfig(no_answer=-1 in task.asked.starts)
        task._settle(cfg, run)
        return task

    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> QuestionWindows:
        return self._windows(self.train, self.asked, tokenizer, max_length)

    def read_windows(self, examples: QuestionWindows, windows: np.ndarray, out: ModelOutput) -> list[WindowSpans]:
        passages = examples.passages
        lengths = passages.tokens.lengths[windows].tolist()
        starts, ends = (logits[0].float().cpu().split(lengths) for logits in (out.start_logits, out.end_logits))
        return [
            best_spans(a, b, passages.chars_of(w), int(passages.inside[w, 0]), self.n_best, self.longest)
            for w, a, b in zip(windows.tolist(), starts, ends, strict=True)
        ]

    def _answer(self, examples: QuestionWindows, question: int, read: list[WindowSpans]) -> Answer:
        return best_answer(examples.asked.contexts[question], read, self.n_best, self.null_threshold)

    def judge(self, examples: QuestionWindows, said: dict[int, list[Any]]) -> Judged:
        metrics = Judged(self.scoring, self.null_threshold is not None)
        assert examples.asked.answers is not None
        for question, read in said.items():
            metrics.add(self._answer(examples, question, read), examples.asked.answers[question])
        return metrics

    def say(self, examples: QuestionWindows, row: int, read: list[Any]) -> dict[str, Any]:
        """id (if the data have it), answer, score, and where it is in the context; no answer: "", and -1.

        Where questions may have none, null_score too: how much better that scores than the best text.
        """
        found = self._answer(examples, row, read)
        names = examples.table.columns
        said: dict[str, Any] = {"id": names["id"][row]} if "id" in names else {}
        said |= {"answer": found.text, "score": round(found.score, 6), "start": found.start, "end": found.end}
        return said if self.null_threshold is None else {**said, "null_score": round(found.null, 6)}

    def count(self, examples: QuestionWindows) -> int:
        return len(examples.asked.questions)


def find_qa(
    table: Table, question: str | None, context: str | None, answers: str | None, answered: bool = True
) -> tuple[str, str, str | None]:
    """The columns of question, context and answers; see tasks.named_columns."""
    roles = {"question": (question, QUESTIONS), "context": (context, CONTEXTS), "answers": (answers, ANSWERS)}
    if not answered:
        del roles["answers"]
    found = find_named(table, roles)
    return found["question"], found["context"], found.get("answers")


def questions_of(table: Table, question: str, context: str, answers: str | None) -> Asked:
    """The rows' questions, contexts and, where there is a column of them, answers, looked for in their contexts.

    Raises:
        ValueError: a row without question or context; answers that are not texts with their starts.
    """
    questions, contexts = strings(table, question), strings(table, context)
    questions = [text.lstrip() for text in questions]  # SQuAD has some behind many spaces, which are tokens for some
    for column, texts in ((question, questions), (context, contexts)):
        empty = next((i for i, text in enumerate(texts) if not text.strip()), None)
        if empty is not None:
            raise ValueError(f"{table.where(empty)}: the row has no text in column {column!r}")
    if answers is None:
        return Asked(questions, contexts)
    every, starts, ends, wrong, moved = [], [], [], [], 0
    for i, value in enumerate(table.columns[answers]):
        texts, places = _answers(table, i, answers, value)
        every.append(texts)
        start = find_answer(contexts[i], texts[0], places[0]) if texts else -1
        if start == UNKNOWN:
            wrong.append(i)
        elif texts and contexts[i][places[0] : places[0] + len(texts[0])].strip() != texts[0].strip():
            moved += 1
        starts.append(start)
        ends.append(start + len(texts[0].strip()) if texts else -1)
    return Asked(questions, contexts, every, tuple(starts), tuple(ends), tuple(wrong), moved)


def find_answer(context: str, text: str, start: int) -> int:
    """Where an answer's text, without spaces around it, begins: where it is said to, else at the nearest such place;
    UNKNOWN: the context does not hold it."""
    bare = text.strip()
    said = start + len(text) - len(text.lstrip())
    if context[said : said + len(bare)] == bare and said >= 0:
        return said
    before, behind = context.rfind(bare, 0, max(said, 0) + len(bare)), context.find(bare, max(said, 0))
    places = [place for place in (before, behind) if place >= 0]
    return min(places, key=lambda place: abs(place - said), default=UNKNOWN)


def _answers(table: Table, row: int, column: str, value: Any) -> tuple[list[str], list[int]]:
    """The texts and starts of {"text": [...], "answer_start": [...]} or a list of {"text", "answer_start"}, each as it
    is or as a text spells it; or of a text with its start in a column of that name."""
    if isinstance(value, str):
        spelt = parse_object(value) or parse_list(value)
        if spelt is None and _START in table.columns:
            start = table.columns[_START][row]
            whole = isinstance(start, str) and re.fullmatch(r"\s*-?\d+(\.0)?\s*", start)
            value = {"text": value, "answer_start": int(float(start)) if whole else start} if value.strip() else None
        else:
            value = value if spelt is None else spelt
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {name: [item.get(name) for item in value] for name in ("text", _START)}
    value = {} if value is None else value
    if isinstance(value, dict):
        texts, starts = value.get("text", []), value.get(_START, [])
        texts, starts = (part if isinstance(part, list) else [part] for part in (texts, starts))
        starts = [int(s) if isinstance(s, float) and s.is_integer() else s for s in starts]  # of pandas
        whole = all(isinstance(t, str) for t in texts) and all(type(s) is int for s in starts)
        if whole and len(texts) == len(starts):
            pairs = [(text, start) for text, start in zip(texts, starts, strict=True) if text.strip()]
            return [text for text, _ in pairs], [start for _, start in pairs]
    raise ValueError(
        f"{table.where(row)}: got {value!r:.80} in column {column!r}, expected "
        '{"text": ["..."], "answer_start": [0]}; both empty: there is no answer'
    )


def _chinese(contexts: list[str]) -> bool:
    """Whether contexts are mostly written in Chinese."""
    some = "".join(context[:200] for context in contexts[:100])
    return 2 * sum(map(is_han, some)) > sum(not c.isspace() for c in some)
