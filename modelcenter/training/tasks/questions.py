"""Rows of questions, contexts and answers, in the format of SQuAD and similar ones."""

import re
from dataclasses import dataclass
from typing import Any

from modelcenter.data.readers.literals import parse_list, parse_object
from modelcenter.data.table import Table
from modelcenter.training.tasks.column_roles import find_named, strings

QUESTIONS = ("question", "query", "question_text")
CONTEXTS = ("context", "passage", "document", "paragraph", "context_text")
ANSWERS = ("answers", "answer")
_START = "answer_start"
NO_ANSWER, UNKNOWN = -1, -2  # values of a start: there is no answer; the answer is not in the context


@dataclass(frozen=True)
class Questions:
    """Questions with their true answers.

    answers: texts for each question; an empty list: it has no answer. None: the answers are not known. starts, ends:
    the characters of the first answer found in the context; a start may be NO_ANSWER or UNKNOWN. wrong: questions whose
    answers were not found. moved: how many answers were found at other positions than given.
    """

    questions: list[str]
    contexts: list[str]
    answers: list[list[str]] | None = None
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    moved: int = 0


def find_question_columns(
    table: Table, question: str | None, context: str | None, answers: str | None, labelled: bool = True
) -> tuple[str, str, str | None]:
    """The columns of question, context and answers; see column_roles.find_named."""
    roles = {"question": (question, QUESTIONS), "context": (context, CONTEXTS), "answers": (answers, ANSWERS)}
    if not labelled:
        del roles["answers"]
    found = find_named(table, roles)
    return found["question"], found["context"], found.get("answers")


def read_questions(table: Table, question: str, context: str, answers: str | None) -> Questions:
    """The questions and contexts of the rows and, if there is a column of answers, their positions in the contexts.

    Raises:
        ValueError: a row has no question or no context; answers are not texts with their starts.
    """
    questions, contexts = strings(table, question), strings(table, context)
    # Some of SQuAD's questions begin with many spaces, which some tokenizers turn into tokens.
    questions = [text.lstrip() for text in questions]
    for column, texts in ((question, questions), (context, contexts)):
        empty = next((i for i, text in enumerate(texts) if not text.strip()), None)
        if empty is not None:
            raise ValueError(f"{table.where(empty)}: the row has no text in column {column!r}")
    if answers is None:
        return Questions(questions, contexts)
    true_answers, starts, ends, wrong, moved = [], [], [], [], 0
    for i, value in enumerate(table.columns[answers]):
        texts, places = _parse_answers(table, i, answers, value)
        true_answers.append(texts)
        start, end = NO_ANSWER, -1
        for text, place in zip(texts, places, strict=True):
            start = find_answer(contexts[i], text, place)
            end = start + len(text.strip())
            if start != UNKNOWN:
                moved += contexts[i][place : place + len(text)].strip() != text.strip()
                break
        if start == UNKNOWN:
            wrong.append(i)
        starts.append(start)
        ends.append(end)
    return Questions(questions, contexts, true_answers, tuple(starts), tuple(ends), tuple(wrong), moved)


def find_answer(context: str, text: str, start: int) -> int:
    """The start of an answer, without surrounding spaces: `start` if it is there, else the nearest position; UNKNOWN:
    it is not in the context."""
    bare = text.strip()
    given = start + len(text) - len(text.lstrip())
    if context[given : given + len(bare)] == bare and given >= 0:
        return given
    before, behind = context.rfind(bare, 0, max(given, 0) + len(bare)), context.find(bare, max(given, 0))
    places = [place for place in (before, behind) if place >= 0]
    return min(places, key=lambda place: abs(place - given), default=UNKNOWN)


def _parse_answers(table: Table, row: int, column: str, value: Any) -> tuple[list[str], list[int]]:
    """The texts and starts of {"text": [...], "answer_start": [...]} or a list of {"text", "answer_start"}, as a value
    or written as a string; or of a text with its start in a column of that name."""
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
        starts = [int(s) if isinstance(s, float) and s.is_integer() else s for s in starts]  # pandas writes integers so
        known = all(isinstance(t, str) for t in texts) and all(type(s) is int for s in starts)
        if known and len(texts) == len(starts):
            pairs = [(text, start) for text, start in zip(texts, starts, strict=True) if text.strip()]
            return [text for text, _ in pairs], [start for _, start in pairs]
    raise ValueError(
        f"{table.where(row)}: got {value!r:.80} in column {column!r}, expected "
        '{"text": ["..."], "answer_start": [0]}; both empty: there is no answer'
    )
