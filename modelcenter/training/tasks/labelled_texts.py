"""Texts, or pairs of texts, with labels: their tokens, their batches and their display."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelcenter.data.batching.collate import pack
from modelcenter.data.schemas.columns import Columns
from modelcenter.data.schemas.labels import Labels
from modelcenter.data.table import Table
from modelcenter.data.tokenization.tokenize import Tokens, tokenize
from modelcenter.training.tasks.column_roles import strings
from modelcenter.training.tasks.examples import TokenExamples
from modelcenter.training.tasks.splits import tells_of_rows

log = logging.getLogger("modelcenter")


@dataclass(frozen=True)
class LabelledExamples(TokenExamples):
    """Texts with their labels. targets None: no labels. groups: int64 (rows,), the group of each row, whose rows are
    judged together; None: each row is judged by itself."""

    labels: Labels
    targets: np.ndarray | None = None
    groups: np.ndarray | None = None

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        return pack(self.tokens, rows, self.targets)

    def show(self, row: int, tokenizer: Any) -> str:
        return f"[{label_text(self.labels, self.targets, row)}] {super().show(row, tokenizer)}"


def check_texts(table: Table, columns: Columns) -> None:
    """Warn, once, of rows with empty texts, which are still trained on because they have labels.

    Raises:
        ValueError: all texts are empty.
    """
    texts = [table.columns[name] for name in (columns.text, columns.text_pair) if name is not None]
    blank = [i for i, row in enumerate(zip(*texts, strict=True)) if all(v == "" or str(v).isspace() for v in row)]
    if len(blank) == len(table):
        raise ValueError(f"{table.name}: column {columns.text!r} has no text")
    if blank and tells_of_rows():
        log.warning("%s: %d rows have an empty text (first: %s)", table.name, len(blank), table.where(blank[0]))


def tokenize_texts(tokenizer: Any, table: Table, columns: Columns, max_length: int) -> Tokens:
    """Tokens of the text (and second text) of every row. Raises ValueError if a row has no text or no tokens."""
    pairs = None if columns.text_pair is None else strings(table, columns.text_pair)
    tokens = tokenize(tokenizer, strings(table, columns.text), pairs, max_length=max_length)
    if not tokens.lengths.all():
        empty = int(np.argmin(tokens.lengths))
        raise ValueError(
            f"{table.where(empty)}: {table.columns[columns.text][empty]!r:.60} has no token, and this tokenizer adds "
            "no special tokens, so there is nothing to read; remove the row"
        )
    return tokens


def label_text(labels: Labels, targets: np.ndarray | None, row: int) -> str:
    """The target of a row as text: "positive", "a, b" or "3.5"."""
    if targets is None:
        return "no label"
    if labels.problem_type == "single_label_classification":
        return labels.names[targets[row]]
    if labels.problem_type == "multi_label_classification":
        return (
            ", ".join(name for name, on in zip(labels.names, targets[row], strict=True) if on) or "none of the labels"
        )
    return ", ".join(f"{value:g}" for value in np.atleast_1d(targets[row]))
