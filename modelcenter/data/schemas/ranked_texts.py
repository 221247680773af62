"""Rows of texts to be ranked: a query, and texts that answer it more or less well.

A row has positives and perhaps negatives, or a text or a list of texts with a label for each. The columns are those of
related_texts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from modelcenter.data.readers.literals import parse_list
from modelcenter.data.schemas.related_texts import (
    Lists,
    RelatedColumns,
    find_related_columns,
    read_lists,
    read_score,
    read_single_texts,
    refuse_classes,
)
from modelcenter.data.table import Table


@dataclass(frozen=True)
class RankedTexts:
    """Texts to be ranked, row by row.

    Attributes:
        queries: the query of each row. texts: the texts of each row, positives before negatives.
        labels: fp32 (texts,), how well each answers its query.
        positives: int64 (rows,), the number of positives, the first texts of each row; None: only the labels tell.
    """

    queries: list[str]
    texts: Lists
    labels: np.ndarray
    positives: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def row_of(self) -> np.ndarray:
        """The row of each text, int64 (texts,)."""
        return np.repeat(np.arange(len(self)), self.texts.counts)

    @property
    def relevance(self) -> np.ndarray:
        """The gains for ranking metrics, fp32 (texts,): 1 for positives and 0 for negatives, or the labels."""
        if self.positives is None:
            return self.labels
        place = np.arange(len(self.labels)) - np.repeat(self.texts.first[:-1], self.texts.counts)
        return (place < np.repeat(self.positives, self.texts.counts)).astype(np.float32)

    def pairs(self) -> tuple[list[str], list[str]]:
        """(the query of each text, the texts)."""
        return [self.queries[row] for row in self.row_of.tolist()], self.texts.texts

    def by_query(self) -> tuple[RankedTexts, np.ndarray]:
        """Merge rows with the same query into one row of texts with labels; also returns the number of the first row of
        each.

        Rows with lists are not merged: each list is a ranking of its own.
        """
        if self.positives is not None or (self.texts.counts > 1).any():
            return self, np.arange(len(self))
        numbers: dict[str, int] = {}
        query_of = np.array([numbers.setdefault(query, len(numbers)) for query in self.queries], np.int64)
        rows = np.argsort(query_of, kind="stable")
        texts = Lists([self.texts.texts[row] for row in rows.tolist()], starts(np.bincount(query_of)))
        return RankedTexts([*numbers], texts, self.labels[rows]), np.unique(query_of, return_index=True)[1]


def starts(counts: np.ndarray) -> np.ndarray:
    """The offsets of concatenated lists, from their lengths, with the end: int64 (lists + 1,)."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def find_ranked_columns(
    table: Table,
    anchor: str | None = None,
    positive: str | None = None,
    negative: str | None = None,
    score: str | None = None,
) -> RelatedColumns:
    """Check the given columns and find the others by their usual names; see related_texts.find_related_columns.

    Raises:
        ValueError: as there, and if the query and the texts have the same column.
    """
    if anchor is not None and anchor == positive:
        raise ValueError(f"positive_column: got {positive!r}, the anchor's; give the column of the texts to rank")
    return find_related_columns(table, anchor, positive, negative, score, ranked=True)


def read_ranked_texts(table: Table, columns: RelatedColumns, labelled: bool = True) -> RankedTexts:
    """The texts of all rows. labelled False: labels are not needed and not read.

    Raises:
        ValueError: a value is not a text or a label, a row has no query or no text, or the numbers of its labels and
            texts differ.
    """
    assert columns.anchor is not None and columns.positive is not None
    queries = read_single_texts(table, columns.anchor)
    positives = read_lists(table, (columns.positive,), needed=True)
    texts, counts = positives, None
    if columns.negatives:
        negatives = read_lists(table, columns.negatives, needed=False)
        texts = _joined(positives, negatives)
    if columns.score is None or columns.negatives:
        counts = positives.counts
    found = RankedTexts(queries, texts, np.zeros(len(texts.texts), np.float32), counts)
    if not labelled:
        return replace(found, positives=None)
    return replace(found, labels=found.relevance if columns.score is None else _read_labels(table, columns, texts))


def check_told_apart(table: Table, columns: RelatedColumns, texts: RankedTexts) -> None:
    """Raise ValueError if all texts of training rows have the same label."""
    if (texts.labels != texts.labels[:1]).any():
        return
    if columns.score is None:
        raise ValueError(
            f"negative_column: the rows of {table.name} have only texts that answer their query, so there is nothing "
            "to learn; give negative_column, or score_column for labels. `modelcenter mine` finds negatives"
        )
    raise ValueError(
        f"score_column: all texts of {table.name} have {texts.labels[0]:g} in column {columns.score!r}, so there is "
        "nothing to learn; `modelcenter mine` finds texts that do not answer a query"
    )


def _joined(first: Lists, second: Lists) -> Lists:
    """The texts of both, row by row."""
    texts: list[str] = []
    for row in range(len(first.counts)):
        for part in (first, second):
            texts += part.texts[part.first[row] : part.first[row + 1]]
    return Lists(texts, first.first + second.first)


def _read_labels(table: Table, columns: RelatedColumns, texts: Lists) -> np.ndarray:
    """The labels of all texts, fp32 (texts,). Raises ValueError as read_ranked_texts does."""
    column = columns.score
    assert column is not None
    refuse_classes(table, column)
    labels: list[float] = []
    for row, (value, count) in enumerate(zip(table.columns[column], texts.counts.tolist(), strict=True)):
        values = _as_list(value)
        if len(values) != count:
            of = ", ".join(map(repr, filter(None, (columns.positive, *columns.negatives))))
            raise ValueError(
                f"{table.where(row)}: the row has {len(values)} labels in column {column!r} and {count} texts in "
                f"column {of}, expected a label for each text"
            )
        labels += [read_score(table, row, column, label) for label in values]
    return np.array(labels, np.float32)


def _as_list(value: Any) -> list[Any]:
    """The labels of a cell, which may be a list written as text, as in a CSV."""
    if isinstance(value, str) and (spelled := parse_list(value)) is not None:
        value = spelled
    return [*value] if isinstance(value, (list, tuple)) else [value]
