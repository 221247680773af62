"""Rows that are objects, as CPM-Bee reads them: the texts below "<ans>" are trained on, or written."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelcenter.data.structured import (
    ANSWER,
    StructuredEncoder,
    StructuredRow,
    Token,
    extension_table,
    structured_batch,
    target_ids,
)
from modelcenter.data.table import Table
from modelcenter.data.tokenization.answer_labels import IGNORED, LabelledTokens
from modelcenter.data.tokenization.tokenize import Tokens
from modelcenter.models.base import Model
from modelcenter.training.inference.text_generation import map_over_ranks
from modelcenter.training.structured import as_text, fill
from modelcenter.training.tasks.answer_examples import AnswerExamples

Object = dict[str, Any]


@dataclass(frozen=True)
class StructuredExamples(AnswerExamples):
    """Objects as tokens. Every batch has the table of all rows, so that the loss of a row is its own."""

    objects: Sequence[Object] = ()
    rows: Sequence[StructuredRow] = ()
    more: Sequence[Token] = ()
    encoder: StructuredEncoder | None = None
    vocab_size: int = 0

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        return structured_batch([self.rows[int(i)] for i in rows], self.vocab_size, self.more)

    def prompt(self, row: int) -> str:
        """The object as JSON, without its answers."""
        return json.dumps(_emptied(self.objects[row]), ensure_ascii=False)

    def fill(self, model: Model, rows: Sequence[int], **search: Any) -> list[list[str]]:
        """What the model writes below "<ans>" in each of the rows. Collective."""
        assert self.encoder is not None
        found = fill(model, self.encoder, [self.objects[i] for i in rows], **search)
        return [[as_text(filled[ANSWER]) for filled in several] for several in found]

    def samples(self, model: Model, count: int, size: int, most: int) -> list[dict[str, Any]]:
        """As Task.samples, of the first rows; size: of them at a time, most: tokens of each answer. Collective."""
        said = map_over_ranks(count, size, lambda rows: self.fill(model, rows, max_new_tokens=most)) if count else []
        return [
            {
                "where": self.where(i),
                "prompt": self.prompt(i),
                "completion": texts[0],
                "reference": as_text(self.objects[i][ANSWER]),
            }
            for i, texts in enumerate(said)
        ]


def objects_of(table: Table, column: str) -> list[Object]:
    """The rows as objects. column: of what is below "<ans>". A value None is no key.

    Keys are in the order of the columns, "<ans>" last: marks are numbered in the order in which they come, so that an
    answer that came before its options would turn their numbers about.
    """
    names = {name: name for name in table.columns if name != column} | {column: ANSWER}
    return [
        {key: table.columns[name][i] for name, key in names.items() if table.columns[name][i] is not None}
        for i in range(len(table))
    ]


def label_objects(
    model: Any, tokenizer: Any, table: Table, objects: Sequence[Object], max_length: int, too_long: str
) -> tuple[StructuredExamples, LabelledTokens]:
    """The objects to train on, and which were left out: those without answers, and those that are too long, as nothing
    of them can be cut.

    Raises:
        ValueError: a model or tokenizer of another kind, a row that is no such object, no row that can be used, and
            with too_long "error" one that is longer than max_length.
    """
    encoder = _encoder(model, tokenizer)
    rows: list[StructuredRow] = []
    kept, unanswered, unfitting = [], [], []
    for i, one in enumerate(objects):
        row = _encoded(encoder, table, one, i, answered=True)
        if not any(_leaves(one[ANSWER])):
            unanswered.append(i)
        elif len(row) > max_length:
            if too_long == "error":
                raise ValueError(
                    f"{table.where(i)}: the row has {len(row)} tokens, max_length is {max_length}; give --too_long "
                    "drop, or a larger --max_length"
                )
            unfitting.append(i)
        else:
            kept.append(i)
            rows.append(row)
    if not rows:
        why = f"has {max_length} tokens or fewer" if unfitting else "has an answer"
        raise ValueError(f"{table.where(0)}: neither this row nor any other {why}")
    more, size = extension_table(rows), model.config.vocab_size
    labels = np.concatenate([target_ids(row, more, size) for row in rows])
    which = [np.array(numbers, np.int64) for numbers in (kept, unanswered, unfitting)]
    found = LabelledTokens(_tokens(rows), labels, which[0], which[1], which[2], [encoder.end])
    used = table if len(kept) == len(table) else table.take(which[0])
    return _rows(used, rows, labels, [objects[i] for i in kept], more, encoder, size), found


def objects_to_fill(
    model: Any, tokenizer: Any, table: Table, objects: Sequence[Object], max_length: int
) -> StructuredExamples:
    """The objects whose answers the model is to write; what stands there says no more than where they go.

    Raises:
        ValueError: as `label_objects`, or an object longer than max_length.
    """
    encoder = _encoder(model, tokenizer)
    emptied = [one | {ANSWER: _emptied(one)[ANSWER]} if ANSWER in one else one for one in objects]
    rows = [_encoded(encoder, table, one, i, answered=False) for i, one in enumerate(emptied)]
    for i, row in enumerate(rows):
        if len(row) > max_length:
            raise ValueError(f"{table.where(i)}: the row has {len(row)} tokens, expected at most {max_length}")
    more, size = extension_table(rows), model.config.vocab_size
    labels = np.full(sum(map(len, rows)), IGNORED, np.int32)
    return _rows(table, rows, labels, emptied, more, encoder, size)


def _rows(
    table: Table,
    rows: Sequence[StructuredRow],
    labels: np.ndarray,
    objects: Sequence[Object],
    more: Sequence[Token],
    encoder: StructuredEncoder,
    vocab_size: int,
) -> StructuredExamples:
    kinds = {"objects": objects, "rows": rows, "more": more, "encoder": encoder, "vocab_size": vocab_size}
    return StructuredExamples(table, _tokens(rows), labels, **kinds)  # type: ignore[arg-type]


def _encoder(model: Any, tokenizer: Any) -> StructuredEncoder:
    if not getattr(model, "structured", False):
        raise ValueError(
            f"columns: objects with {ANSWER!r} are for CPM-Bee, and this is {model.config.model_type}; give "
            "prompt_column and response_column, or text_column"
        )
    return StructuredEncoder(tokenizer)


def _encoded(encoder: StructuredEncoder, table: Table, one: Object, row: int, answered: bool) -> StructuredRow:
    try:
        return encoder.encode(one, answered=answered)
    except ValueError as error:
        raise ValueError(f"{table.where(row)}: {error}") from error


def _tokens(rows: Sequence[StructuredRow]) -> Tokens:
    ids = np.concatenate([row.values[:, 0] for row in rows])
    return Tokens(ids, np.cumsum([0, *map(len, rows)]).astype(np.int64), None, 0)


def _leaves(value: Any) -> list[str]:
    return [text for below in value.values() for text in _leaves(below)] if isinstance(value, dict) else [value]


def _emptied(one: Object) -> Object:
    def empty(value: Any) -> Any:
        return {key: empty(below) for key, below in value.items()} if isinstance(value, dict) else ""

    return one | {ANSWER: empty(one[ANSWER])}
