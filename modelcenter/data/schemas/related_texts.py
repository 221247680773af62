"""Rows of related texts: an anchor, such as a question, its positive, such as the answer, and perhaps negatives, which
do not answer it; or two texts and a score of their similarity.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelcenter.data.readers.literals import parse_list
from modelcenter.data.schemas.column_names import TEXT_NAMES
from modelcenter.data.schemas.columns import check_columns, find_usual_name, is_missing, quoted_names
from modelcenter.data.schemas.text_pairs import PAIRS
from modelcenter.data.table import Table

# Usual names of anchor and positive, the least ambiguous first.
_PAIRS = (
    ("anchor", "positive"), ("query", "positive"), ("query", "pos"), ("question", "positive"),
    ("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("text1", "text2"), ("text_a", "text_b"),
    ("question1", "question2"),
    ("query", "document"), ("query", "passage"), ("query", "answer"), ("question", "answer"), ("question", "passage"),
    ("question", "context"), ("premise", "hypothesis"), ("title", "body"), ("title", "text"), ("title", "abstract"),
    ("anchor", "text"), ("text", "positive"), ("sentence", "positive"), *PAIRS,
)  # fmt: skip
# For rankings, where the second may be a list of texts, not all of which belong to the query.
_RANKED_PAIRS = (
    *_PAIRS, ("query", "docs"), ("query", "documents"), ("query", "passages"), ("query", "texts"), ("query", "text"),
)  # fmt: skip
_SCORES = (
    "score", "label", "similarity", "similarity_score", "relatedness_score", "is_duplicate", "labels", "scores",
    "relevance",
)  # fmt: skip
_NEGATIVE = re.compile(r"(hard_)?neg(ative)?s?(_?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class RelatedColumns:
    """Names of the columns by role. anchor, positive: one may be None if a trained model reads single texts. negatives:
    columns of texts or of lists of texts. score: the similarity of anchor and positive, a number; None: they belong
    together."""

    anchor: str | None
    positive: str | None
    negatives: tuple[str, ...] = ()
    score: str | None = None

    def roles(self) -> dict[str, str | None]:
        """The columns by role, for flags."""
        negative = ",".join(self.negatives) or None
        return {"anchor": self.anchor, "positive": self.positive, "negative": negative, "score": self.score}

    @property
    def alone(self) -> bool:
        """Whether each text is its own positive."""
        return self.anchor is not None and self.anchor == self.positive

    def shown(self) -> str:
        """In words: "anchor 'query', positive 'answer'"."""
        return ", ".join(f"{role} {name!r}" for role, name in self.roles().items() if name is not None)


def find_related_columns(
    table: Table,
    anchor: str | None = None,
    positive: str | None = None,
    negative: str | None = None,
    score: str | None = None,
    *,
    ranked: bool = False,
) -> RelatedColumns:
    """Check the given columns and find the others by their usual names.

    Args:
        positive: may be the anchor's column: each text is then its own positive, with another dropout mask.
        negative: a column, or several, separated by commas.
        ranked: the texts of a row are to be ranked: they may be in one column, and there may be scores, of how well
            each answers the anchor, along with negatives.

    Raises:
        ValueError: a column does not exist or has two roles, a needed one cannot be found, or there are both negatives
            and scores.
    """
    negatives = _named_columns(table, negative)
    alone = anchor is not None and anchor == positive
    named = {"anchor": anchor, "positive": None if alone else positive, "score": score}
    check_columns(table, named)
    for name in negatives:
        check_columns(table, {**named, "negative": name})
    if alone:
        if score is not None:
            raise ValueError(
                f"positive_column: got {positive!r}, the anchor's, together with score_column; give the column of "
                "another text"
            )
        return RelatedColumns(anchor, positive, negatives)
    if anchor is None or positive is None:
        pairs = _RANKED_PAIRS if ranked else _PAIRS
        anchor, positive = _find_pair(table, anchor, positive, {*negatives, score}, pairs)
    used = {anchor, positive, score, *negatives}
    if not negatives and (score is None or ranked):
        negatives = tuple(n for n in table.columns if _NEGATIVE.fullmatch(n) and n not in used)
    if score is None and not negatives:
        score = find_usual_name(table, _SCORES, used)
    if score is not None and negatives and not ranked:
        raise ValueError(
            f"negative_column: got {', '.join(negatives)} together with score_column {score}, but rows whose two texts "
            "have a similarity score have no negatives; give one of them"
        )
    return RelatedColumns(anchor, positive, negatives, score)


def find_columns_to_read(table: Table, anchor: str | None, positive: str | None) -> RelatedColumns:
    """The columns that a trained model reads: the given ones, else two with usual names, else one of single texts.

    Raises:
        ValueError: a column does not exist, or none is given and none found.
    """
    check_columns(table, {"anchor": anchor, "positive": positive})
    if anchor is not None or positive is not None:
        return RelatedColumns(anchor, positive)
    try:
        return RelatedColumns(*_find_pair(table, None, None, set(), _PAIRS))
    except ValueError:
        only = next(iter(table.columns)) if len(table.columns) == 1 else None
        text = find_usual_name(table, TEXT_NAMES, ()) or only
    if text is None:
        raise ValueError(
            f"positive_column: which column of {table.name} has the texts? It has {quoted_names(table)}. Give "
            "positive_column, anchor_column for queries, or both to compare two texts"
        )
    return RelatedColumns(None, text)


def _named_columns(table: Table, given: str | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if given in table.columns else tuple(part.strip() for part in given.split(","))


def _find_pair(
    table: Table,
    anchor: str | None,
    positive: str | None,
    used: set[str | None],
    pairs: Sequence[tuple[str, str]],
) -> tuple[str, str]:
    lower = {name.lower(): name for name in reversed(table.columns) if name not in used}
    for first, second in pairs:
        a, b = anchor or lower.get(first), positive or lower.get(second)
        if a is not None and b is not None and a != b:
            return a, b
    free = [n for n in table.columns if n not in {*used, anchor, positive} and not _NEGATIVE.fullmatch(n)]
    if len(free) == 1 and (anchor is not None or positive is not None):
        return anchor or free[0], positive or free[0]
    role = "anchor" if anchor is None else "positive"
    raise ValueError(
        f"{role}_column: which column of {table.name} is the {role}? It has {quoted_names(table)}, none of them a "
        "usual name. Give anchor_column and positive_column; the same for both trains on single texts"
    )


@dataclass(frozen=True)
class Lists:
    """The texts of rows that have one or more each: those of row i are texts[first[i]:first[i + 1]]."""

    texts: list[str]
    first: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """The number of texts in each row, int64 (rows,)."""
        return np.diff(self.first)


@dataclass(frozen=True)
class RelatedTexts:
    """The texts of rows. scores: fp64 (rows,), the similarity of anchor and positive; None: they belong together."""

    anchors: list[str]
    positives: Lists
    negatives: Lists
    scores: np.ndarray | None = None


def read_related_texts(table: Table, columns: RelatedColumns) -> RelatedTexts:
    """The texts of all rows.

    Raises:
        ValueError: a value is not a text or a score, a row has no anchor or positive, or several where one is expected,
            or all scores are equal or are classes.
    """
    assert columns.anchor is not None and columns.positive is not None
    positives = read_lists(table, (columns.positive,), needed=True)
    scores = None if columns.score is None else _read_scores(table, columns.score)
    if scores is not None:
        _check_single(table, columns.positive, positives, " in a row with a score")
    anchors, negatives = read_single_texts(table, columns.anchor), read_lists(table, columns.negatives, needed=False)
    return RelatedTexts(anchors, positives, negatives, scores)


def read_single_texts(table: Table, column: str) -> list[str]:
    """The texts of a column with one per row. Raises ValueError if a row has none or several."""
    found = read_lists(table, (column,), needed=True)
    _check_single(table, column, found)
    return found.texts


def _check_single(table: Table, column: str, found: Lists, where: str = "") -> None:
    if len(found.texts) != len(table):
        row = int(np.argmax(found.counts > 1))
        count = found.counts[row]
        raise ValueError(f"{table.where(row)}: the row has {count} texts in column {column!r}, expected one{where}")


def read_lists(table: Table, columns: Sequence[str], needed: bool) -> Lists:
    """The texts of some columns, each holding texts or lists of texts.

    Args:
        needed: each row must have at least one.

    Raises:
        ValueError: a value is not a text, or a row has none.
    """
    rows: list[list[str]] = []
    for i, values in enumerate(zip(*(table.columns[name] for name in columns), strict=True)):
        row: list[str] = []
        for name, value in zip(columns, values, strict=True):
            row += _texts(table, i, name, value)
        if needed and not row:
            shown = ", ".join(map(repr, columns))
            raise ValueError(f"{table.where(i)}: the row has no text in column {shown}; give it one or remove it")
        rows.append(row)
    rows = rows or [[]] * len(table)
    first = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return Lists(list(itertools.chain.from_iterable(rows)), first)


def _texts(table: Table, row: int, column: str, value: Any) -> list[str]:
    """The texts of a cell. Raises ValueError if it holds something else."""
    if isinstance(value, str) and (spelled := parse_list(value)) is not None:  # in a cell of a CSV
        value = spelled
    values = value if isinstance(value, (list, tuple)) else [value]
    values = [text for text in values if not is_missing(text)]
    if not all(isinstance(text, (str, int, float)) for text in values):
        raise ValueError(f"{table.where(row)}: the row has {value!r:.60}, expected texts, in column {column!r}")
    return [str(text) for text in values]


def _read_scores(table: Table, column: str) -> np.ndarray:
    """The scores, fp64 (rows,).

    Raises:
        ValueError: a value is not a finite number, or all rows have the same.
    """
    refuse_classes(table, column)
    scores = np.array([read_score(table, row, column, value) for row, value in enumerate(table.columns[column])])
    if len(scores) and (scores == scores[0]).all():
        raise ValueError(
            f"score_column: all rows of {table.name} have {scores[0]:g} in column {column!r}, which says nothing about "
            "similarity; if all pairs belong together, leave the column out of the data"
        )
    return scores


def refuse_classes(table: Table, column: str) -> None:
    """Raise ValueError if a column of scores holds more than two classes."""
    if (names := table.classes.get(column)) is not None and len(names) > 2:
        raise ValueError(
            f"score_column: column {column!r} of {table.name} holds classes ({', '.join(names[:5])}), not scores of "
            "similarity; keep only the rows whose texts belong together, and leave the column out"
        )


def read_score(table: Table, row: int, column: str, value: Any) -> float:
    """A score in a cell, or in a list in it. Raises ValueError if it is not a finite number."""
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"{table.where(row)}: the row has {value!r:.60}, expected a number, in column {column!r}")
    return score
