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
    """Objects as tokens. rows: the objects, encoded. extra_tokens: those of all rows that the vocabulary lacks. Every
    batch has all of them, so that the loss of a row does not depend on the others."""

    objects: Sequence[Object] = ()
    rows: Sequence[StructuredRow] = ()
    extra_tokens: Sequence[Token] = ()
    encoder: StructuredEncoder | None = None
    vocab_size: int = 0

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        return structured_batch([self.rows[int(i)] for i in rows], self.vocab_size, self.extra_tokens)

    def prompt(self, row: int) -> str:
        """The object as JSON, without its answers."""
        return json.dumps(_emptied(self.objects[row]), ensure_ascii=False)

    def fill(self, model: Model, rows: Sequence[int], **search: Any) -> list[list[str]]:
        """The num_return_sequences texts that the model writes below "<ans>" in each of the rows. Collective."""
        assert self.encoder is not None
        copies = fill(model, self.encoder, [self.objects[i] for i in rows], **search)
        return [[as_text(filled[ANSWER]) for filled in of_row] for of_row in copies]

    def samples(self, model: Model, count: int, batch_size: int, max_new_tokens: int) -> list[dict[str, Any]]:
        """As Task.samples, for the first rows. max_new_tokens: of each answer. Collective."""

        def fill_rows(rows: list[int]) -> list[list[str]]:
            return self.fill(model, rows, max_new_tokens=max_new_tokens)

        completions = map_over_ranks(count, batch_size, fill_rows) if count else []
        return [
            {
                "where": self.where(i),
                "prompt": self.prompt(i),
                "completion": texts[0],
                "reference": as_text(self.objects[i][ANSWER]),
            }
            for i, texts in enumerate(completions)
        ]


def objects_of(table: Table, column: str) -> list[Object]:
    """The rows as objects, without the keys of values that are None. column: of the values of "<ans>".

    Parquet and the Hub give every row the keys of all rows, with None where a row lacks them, at any depth.
    Keys are in the order of the columns, "<ans>" last: marks are numbered in the order in which they come, so an answer
    before its options would change their numbers.
    """
    names = {name: name for name in table.columns if name != column} | {column: ANSWER}
    rows = ({key: table.columns[name][i] for name, key in names.items()} for i in range(len(table)))
    return [{key: _without_none(value) for key, value in row.items() if value is not None} for row in rows]


def _without_none(value: Any) -> Any:
    """`value` without the keys of None below it; an object of nothing else stays, as one of texts to be written."""
    if not isinstance(value, dict):
        return value
    return {key: _without_none(below) for key, below in value.items() if below is not None} or value


def label_objects(
    model: Any, tokenizer: Any, table: Table, objects: Sequence[Object], max_length: int, too_long: str
) -> tuple[StructuredExamples, LabelledTokens]:
    """The objects to train on, and which were left out: those without answers, and those that are too long, as an
    object cannot be cut.

    Raises:
        ValueError: a model or tokenizer of another kind, a row that is no such object, no row that can be used, and
            with too_long "error" one that is longer than max_length.
    """
    encoder = _encoder(model, tokenizer)
    rows: list[StructuredRow] = []
    kept, unanswered, unfitting = [], [], []
    for i, one in enumerate(objects):
        row = _encoded(encoder, table, one, i, answered=True)
        if not any(_texts_below(one[ANSWER])):
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
    extra, size = extension_table(rows), model.config.vocab_size
    labels = np.concatenate([target_ids(row, extra, size) for row in rows])
    which = [np.array(numbers, np.int64) for numbers in (kept, unanswered, unfitting)]
    labelled = LabelledTokens(_tokens(rows), labels, which[0], which[1], which[2], [encoder.end])
    examples = StructuredExamples(
        table.subset(which[0]),
        labelled.tokens,
        labels,
        objects=[objects[i] for i in kept],
        rows=rows,
        extra_tokens=extra,
        encoder=encoder,
        vocab_size=size,
    )
    return examples, labelled


def objects_to_fill(
    model: Any, tokenizer: Any, table: Table, objects: Sequence[Object], max_length: int
) -> StructuredExamples:
    """The objects whose answers the model is to write. Of answers that are there only the keys are used.

    Raises:
        ValueError: as `label_objects`, or an object longer than max_length.
    """
    encoder = _encoder(model, tokenizer)
    emptied = [one | {ANSWER: _emptied(one)[ANSWER]} if ANSWER in one else one for one in objects]
    rows = [_encoded(encoder, table, one, i, answered=False) for i, one in enumerate(emptied)]
    for i, row in enumerate(rows):
        if len(row) > max_length:
            raise ValueError(f"{table.where(i)}: the row has {len(row)} tokens, expected at most {max_length}")
    extra, size = extension_table(rows), model.config.vocab_size
    labels = np.full(sum(map(len, rows)), IGNORED, np.int32)
    return StructuredExamples(
        table,
        _tokens(rows),
        labels,
        objects=emptied,
        rows=rows,
        extra_tokens=extra,
        encoder=encoder,
        vocab_size=size,
    )


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


def _texts_below(value: Any) -> list[str]:
    return [text for below in value.values() for text in _texts_below(below)] if isinstance(value, dict) else [value]


def _emptied(one: Object) -> Object:
    def empty(value: Any) -> Any:
        return {key: empty(below) for key, below in value.items()} if isinstance(value, dict) else ""

    return one | {ANSWER: empty(one[ANSWER])}
