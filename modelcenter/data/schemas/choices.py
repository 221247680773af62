"""Rows of multiple choice: the columns of the question, the choices and the correct choice, and their texts.

The usual names cover the columns of SWAG, HellaSwag, COPA, RACE, C3, ARC, OpenBookQA, CommonsenseQA, PIQA, Social IQa
and Winogrande.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelcenter.data.readers.literals import parse_list, parse_object
from modelcenter.data.schemas.columns import check_columns, find_usual_name, is_missing, quoted_names
from modelcenter.data.table import Table

CONTEXTS = ("context", "article", "passage", "premise", "sent1", "ctx_a", "paragraph", "ctx", "sentence", "text")
QUESTIONS = ("question", "sent2", "ctx_b", "question_stem", "query", "goal")
CHOICES = ("choices", "options", "endings", "choice", "candidates")
LABELS = ("label", "labels", "answer", "answerkey", "correct", "gold", "target")
_NUMBERED = re.compile(r"(choice|option|ending|answer|sol|op)_?(\d+|[a-h])", re.IGNORECASE)
_BLANK = re.compile(r"(?<![A-Za-z0-9])_+(?![A-Za-z0-9])")
# COPA gives its questions as a single word.
_QUESTION_OF_WORD = {"cause": "What was the cause?", "effect": "What was the effect?"}


@dataclass(frozen=True)
class ChoiceColumns:
    """Names of the columns by role. choices: one column of lists, or one column per choice."""

    context: str | None
    question: str | None
    choices: tuple[str, ...]
    label: str | None = None

    def shown(self) -> str:
        """In words: "context 'premise', choices 'choice1', 'choice2', label 'label'"."""
        roles = {"context": self.context, "question": self.question, "label": self.label}
        quoted = {role: repr(name) for role, name in roles.items() if name is not None}
        quoted["choices"] = ", ".join(map(repr, self.choices))
        return ", ".join(
            f"{role} {quoted[role]}" for role in ("context", "question", "choices", "label") if role in quoted
        )


def find_choice_columns(
    table: Table,
    context: str | None = None,
    question: str | None = None,
    choices: str | None = None,
    label: str | None = None,
    *,
    labelled: bool = True,
) -> ChoiceColumns:
    """Check the given columns and find the others by their usual names.

    Args:
        choices: a column of lists, or several columns, separated by commas. labelled: a label is needed; otherwise it
            is None unless given.

    Raises:
        ValueError: a column does not exist or has two roles, or a needed one cannot be found.
    """
    parts = () if choices is None else (choices,) if choices in table.columns else tuple(choices.split(","))
    parts = tuple(part.strip() for part in parts)
    named = {"context": context, "question": question, "label": label}
    check_columns(table, named)
    for i, part in enumerate(parts):
        check_columns(table, {**named, "choices": part, **({"first choices": parts[0]} if i else {})})
    used = {name for name in (*named.values(), *parts) if name is not None}
    if not parts:
        parts = _find_choices(table, used)
        used |= set(parts)
    if label is None and labelled:
        label = find_usual_name(table, LABELS, used)
        if label is None:
            raise ValueError(
                f"label_column: which column of {table.name} has the correct choice? None is called "
                f"{' or '.join(LABELS[:3])}; the columns are {quoted_names(table)}. Give label_column"
            )
    used.add(label or "")
    if question is None:
        question = find_usual_name(table, QUESTIONS, used)
        used.add(question or "")
    if context is None:
        context = find_usual_name(table, CONTEXTS, used)
    if context is None and question is None:
        raise ValueError(
            f"context_column: which column of {table.name} do the choices belong to? The columns are "
            f"{quoted_names(table)}. Give context_column or question_column"
        )
    return ChoiceColumns(context, question, parts, label)


def _find_choices(table: Table, used: set[str]) -> tuple[str, ...]:
    lists = [n for n in table.columns if n.lower() in CHOICES and n not in used and _holds_lists(table.columns[n])]
    if lists:
        return (lists[0],)
    families: dict[str, list[str]] = {}
    for name in table.columns:
        match = _NUMBERED.fullmatch(name)
        if match is not None and name not in used:
            families.setdefault(match[1].lower(), []).append(name)
    several = next((sorted(names, key=_number_in_name) for names in families.values() if len(names) > 1), None)
    if several is None:
        raise ValueError(
            f"choices_column: which columns of {table.name} hold the choices? It has {quoted_names(table)}. Give "
            "choices_column: a column of lists, or several columns separated by commas"
        )
    return tuple(several)


def _number_in_name(name: str) -> tuple[int, str]:
    last = _NUMBERED.fullmatch(name)
    assert last is not None
    return (int(last[2]), "") if last[2].isdigit() else (0, last[2].lower())


def _holds_lists(values: Sequence[Any]) -> bool:
    return isinstance(_parse_cell(next((value for value in values if value is not None), None)), (list, tuple, dict))


def _parse_cell(value: Any) -> Any:
    """The list or object of choices that a text represents; any other value unchanged."""
    return (parse_list(value) or parse_object(value) or value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Choices:
    """The texts of each row. context, question: "" if there is none. offered: the texts of the choices. names: the
    rows' own names for the choices ("A", "B"), if any."""

    context: list[str]
    question: list[str]
    offered: list[list[str]]
    names: list[list[str]] | None

    @property
    def counts(self) -> np.ndarray:
        """The number of choices in each row, int64 (rows,)."""
        return np.fromiter(map(len, self.offered), np.int64, len(self.offered))

    def pairs(self) -> tuple[list[str], list[str]]:
        """The two texts for each choice of each row, in order: the context, and the question with the choice in it.
        Without a context: the question and the choice."""
        firsts, seconds = [], []
        for context, question, offered in zip(self.context, self.question, self.offered, strict=True):
            for choice in offered:
                firsts.append(context or question)
                seconds.append(_complete(question, choice) if context else choice)
        return firsts, seconds


def _complete(question: str, choice: str) -> str:
    """A question with its blank (RACE writes "_") filled by a choice; without a blank, followed by the choice."""
    if _BLANK.search(question):
        return _BLANK.sub(lambda _: choice, question, count=1)
    space = " " if question and question[-1].isascii() else ""
    return f"{question}{space}{choice}"


def read_choices(table: Table, columns: ChoiceColumns) -> Choices:
    """The texts of all rows.

    Raises:
        ValueError: a row has no context or question, fewer than two choices, or a choice that is not a text.
    """
    context, question = (_texts(table, name) for name in (columns.context, columns.question))
    empty = next((i for i, (a, b) in enumerate(zip(context, question, strict=True)) if not (a + b).strip()), None)
    if empty is not None:
        named = " and ".join(repr(name) for name in (columns.context, columns.question) if name is not None)
        raise ValueError(f"{table.where(empty)}: the row has no text in column {named}")
    if context and set(question) <= set(_QUESTION_OF_WORD):
        question = [_QUESTION_OF_WORD[word] for word in question]
    offered, names = [], []
    for i, values in enumerate(zip(*(table.columns[name] for name in columns.choices), strict=True)):
        texts = _parse_cell(values[0]) if len(columns.choices) == 1 else list(values)
        if isinstance(texts, dict):  # {"label": ["A", "B"], "text": [...]}, as ARC and CommonsenseQA
            names.append([str(name) for name in texts.get("label") or []])
            texts = texts.get("text")
        if not isinstance(texts, (list, tuple)) or len(texts) < 2 or not all(map(_is_text, texts)):
            shown = ", ".join(map(repr, columns.choices))
            raise ValueError(f"{table.where(i)}: got {texts!r:.80} in column {shown}, expected two or more texts")
        offered.append([str(text).strip() for text in texts])
    whole = len(names) == len(offered) and all(len(a) == len(b) for a, b in zip(names, offered, strict=True))
    return Choices(context, question, offered, names if whole else None)


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and bool(str(value).strip())


def _texts(table: Table, column: str | None) -> list[str]:
    """The texts of a column, "" if a row has none; a list of lines becomes one text.

    Raises:
        ValueError: a value is not a text, such as an object.
    """
    if column is None:
        return [""] * len(table)
    texts = []
    for i, value in enumerate(table.columns[column]):
        lines = value if isinstance(value, (list, tuple)) else [] if is_missing(value) else [value]
        if not all(isinstance(line, (str, int, float)) for line in lines):
            raise ValueError(f"{table.where(i)}: the row has {value!r:.60}, expected a text, in column {column!r}")
        text = "\n".join(map(str, lines))
        texts.append(text if lines is value else text.strip())
    return texts


def correct_choices(
    table: Table, column: str, choices: Choices, first: int | None = None, kind: str | None = None
) -> tuple[np.ndarray, int, str]:
    """(int64 (rows,): the correct choice of each row, counted from 0; the number of the first choice in the data; the
    kind of the labels).

    All labels are of one kind: "name" (the row's own name for the choice), "text" (of the choice), "letter" or
    "number".

    Args:
        first: the number of the first choice, 0 or 1; None: 1 if no label is 0 and some row's label equals its number
            of choices.
        kind: how to read ambiguous labels, such as numbers when the choices are numbers too; ignored if no label is of
            this kind. None: the kind that fits the most rows, the first of these.

    Raises:
        ValueError: a row has no label, or a label that is none of its choices.
    """
    values = ["" if is_missing(value) else str(value).strip() for value in table.columns[column]]
    missing = next((i for i, value in enumerate(values) if value in ("", "-1", "-1.0")), None)
    if missing is not None:
        raise ValueError(f"{table.where(missing)}: the row has no label in column {column!r}; label it or remove it")
    counts = choices.counts.tolist()
    numbers = [_number(value, count) for value, count in zip(table.columns[column], counts, strict=True)]
    one = 0 not in numbers and any(n == count for n, count in zip(numbers, counts, strict=True))
    start = int(one) if first is None else first
    # For each kind, the choice of every row's label, and the possible values.
    read_as: dict[str, tuple[Sequence[Any], Sequence[Sequence[Any]]]] = {
        "name": (values, choices.names or [[]] * len(values)),
        "text": (values, choices.offered),
        "letter": (values, [_LETTERS[:count] for count in counts]),
        "number": (numbers, [range(start, start + count) for count in counts]),
    }
    fits = {of: [label in row for label, row in zip(*pair, strict=True)] for of, pair in read_as.items()}
    if kind is None or not any(fits[kind]):
        kind = max(fits, key=lambda of: sum(fits[of]))
    if not all(fits[kind]):
        i = fits[kind].index(False)
        others = f"; other rows are read as label_kind {kind}" if any(fits[kind]) else ""
        raise ValueError(
            f"{table.where(i)}: label {values[i]!r} in column {column!r} is none of the {counts[i]} choices; expected "
            f"{start} to {counts[i] + start - 1}, a letter from A, or the text of the choice{others}"
        )
    chosen = [row.index(label) for label, row in zip(*read_as[kind], strict=True)]
    return np.array(chosen, np.int64), start if kind == "number" else first or 0, kind


def _number(label: Any, count: int) -> int:
    """The number of a label, including floats made by pandas, and true or false for two choices; -1 for anything
    else."""
    if isinstance(label, bool):
        return int(label) if count == 2 else -1
    number = re.fullmatch(r"(\d+)(\.0)?", str(label).strip())
    return int(number[1]) if number else -1


_LETTERS = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
