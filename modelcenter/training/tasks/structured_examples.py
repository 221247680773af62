"""Rows that are objects, as CPM-Bee reads them: the texts under "<ans>" are trained on, or generated."""

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
    """Objects as tokens. rows: the encoded objects. extra_tokens: tokens of all rows that are not in the vocabulary.
    Every batch has all of them, so that the loss of a row does not depend on other rows."""

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
        """The num_return_sequences texts generated under "<ans>" in each of the rows. Collective."""
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
    """The rows as objects, without keys whose values are None. column: of the values of "<ans>".

    Parquet and the Hub give every row the keys of all rows, at any depth, with None where a row lacks them.
    Keys have the order of the columns, with "<ans>" last: marks are numbered in order of occurrence, so an answer
    before its options would change their numbers.
    """
    names = {name: name for name in table.columns if name != column} | {column: ANSWER}
    rows = ({key: table.columns[name][i] for name, key in names.items()} for i in range(len(table)))
    return [{key: _without_none(value) for key, value in row.items() if value is not None} for row in rows]


def _without_none(value: Any) -> Any:
    """`value` without nested keys whose values are None; an object with only such keys stays, as texts to generate."""
    if not isinstance(value, dict):
        return value
    return {key: _without_none(below) for key, below in value.items() if below is not None} or value


def label_objects(
    model: Any, tokenizer: Any, table: Table, objects: Sequence[Object], max_length: int, too_long: str
) -> tuple[StructuredExamples, LabelledTokens]:
    """The objects to train on, and those left out: objects without answers, and objects that are too long, because they
    cannot be truncated.

    Raises:
        ValueError: the model or tokenizer is of another kind, a row is not such an object, no row can be used or, with
            too_long "error", one is longer than max_length.
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
                    f"{table.where(i)}: the row has {len(row)} tokens, but max_length is {max_length}; give --too_long "
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
    """The objects whose answers are to be generated. Of given answers, only the keys are used.

    Raises:
        ValueError: as `label_objects`, or an object is longer than max_length.
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
            f"columns: objects with {ANSWER!r} are for CPM-Bee, but this model is {model.config.model_type}; give "
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
