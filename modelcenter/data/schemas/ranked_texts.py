"""Rows of texts to be ranked: a query, and texts of which some answer it better than others.

A row has positives and perhaps negatives, or a text or a list of texts with a label of each. The columns are those of
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
        queries: of the rows. texts: of each row, the positives before the negatives.
        labels: fp32 (texts,), how well each answers its query.
        positives: int64 (rows,), how many of the first texts of each row are positives; None: labels alone say it.
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
        """By which rankings are judged, fp32 (texts,): 1 of positives and 0 of negatives, or the labels."""
        if self.positives is None:
            return self.labels
        place = np.arange(len(self.labels)) - np.repeat(self.texts.first[:-1], self.texts.counts)
        return (place < np.repeat(self.positives, self.texts.counts)).astype(np.float32)

    def pairs(self) -> tuple[list[str], list[str]]:
        """(the query of each text, the texts)."""
        return [self.queries[row] for row in self.row_of.tolist()], self.texts.texts

    def by_query(self) -> tuple[RankedTexts, np.ndarray]:
        """Rows with the same query as one row, of texts with labels; and the numbers of the rows that these begin with.

        What is in lists stays as it is: each list is a ranking of its own.
        """
        if self.positives is not None or (self.texts.counts > 1).any():
            return self, np.arange(len(self))
        numbers: dict[str, int] = {}
        query_of = np.array([numbers.setdefault(query, len(numbers)) for query in self.queries], np.int64)
        rows = np.argsort(query_of, kind="stable")
        texts = Lists([self.texts.texts[row] for row in rows.tolist()], starts(np.bincount(query_of)))
        return RankedTexts([*numbers], texts, self.labels[rows]), np.unique(query_of, return_index=True)[1]


def starts(counts: np.ndarray) -> np.ndarray:
    """The number of the first of each of some lists that lie end to end, and the end: int64 (lists + 1,)."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def find_ranked_columns(
    table: Table,
    anchor: str | None = None,
    positive: str | None = None,
    negative: str | None = None,
    score: str | None = None,
) -> RelatedColumns:
    """Check the columns given and find the others by their usual names; see related_texts.find_related_columns.

    Raises:
        ValueError: also where the query and the texts have one column.
    """
    if anchor is not None and anchor == positive:
        raise ValueError(f"positive_column: got {positive!r}, the anchor's; give the column of the texts to rank")
    return find_related_columns(table, anchor, positive, negative, score, ranked=True)


def read_ranked_texts(table: Table, columns: RelatedColumns, labelled: bool = True) -> RankedTexts:
    """The texts of all rows. labelled: False: labels are not needed, and not read.

    Raises:
        ValueError: a value that is no text or no label, a row without a query or a text, or with another number of
            labels than of texts.
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
    """Raise ValueError for rows to train on of which all texts have the same label."""
    if (texts.labels != texts.labels[:1]).any():
        return
    if columns.score is None:
        raise ValueError(
            f"negative_column: the rows of {table.name} have no text that does not answer its query, so there is "
            "nothing to tell apart; name the column of negatives, or that of labels by score_column. `modelcenter "
            "mine` finds negatives"
        )
    raise ValueError(
        f"score_column: all texts of {table.name} have {texts.labels[0]:g} in column {columns.score!r}, which tells "
        "nothing apart; `modelcenter mine` finds texts that do not answer a query"
    )


def _joined(first: Lists, second: Lists) -> Lists:
    """Row by row the texts of both."""
    texts: list[str] = []
    for row in range(len(first.counts)):
        for part in (first, second):
            texts += part.texts[part.first[row] : part.first[row + 1]]
    return Lists(texts, first.first + second.first)


def _read_labels(table: Table, columns: RelatedColumns, texts: Lists) -> np.ndarray:
    """The labels of all texts, fp32 (texts,). Raises ValueError: see read_ranked_texts."""
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
    """The labels of a cell, which may be spelled as a list, as in a CSV."""
    if isinstance(value, str) and (spelled := parse_list(value)) is not None:
        value = spelled
    return [*value] if isinstance(value, (list, tuple)) else [value]
