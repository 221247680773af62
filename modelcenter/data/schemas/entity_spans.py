"""Entities as character spans of a text, as written by annotation tools, converted to words with tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelcenter.data.table import Table

_START, _END = ("start", "start_offset", "begin"), ("end", "end_offset")
_TYPE = ("label", "type", "tag", "entity", "labels")
_Entity = tuple[int, int, str]  # first character, the one after the last, and type


def has_entity_spans(values: Sequence[Any], texts: Sequence[Any]) -> bool:
    """Whether a column holds such entities: lists of [start, end, type] or of {"start", "end", "label"}, or empty lists
    next to texts (tags would have one entry per word)."""
    first = next((value for value in values if value), None)
    if first is None and [] in values:
        return isinstance(next((text for text in texts if text), None), str)
    if not isinstance(first, (list, tuple)):
        return False
    if isinstance(first[0], Mapping):
        return _field(first[0], _START) is not None and _field(first[0], _END) is not None
    return isinstance(first[0], (list, tuple))


def spans_to_tags(
    table: Table, text_column: str, spans_column: str, split: Callable[[str], list[str]]
) -> tuple[list[list[str]], list[list[str]]]:
    """The words of each row, with a BIO tag for each word.

    A word ends where an entity does. Characters are counted from 0, and the end of an entity is the character after it.

    Args:
        split: a text into words.

    Raises:
        ValueError: a row has no text, or an entity has another form, is outside its text, contains no word or overlaps
            another.
    """
    words, tags = [], []
    for row, (text, spans) in enumerate(zip(table.columns[text_column], table.columns[spans_column], strict=True)):
        if not isinstance(text, str):
            raise ValueError(f"{table.where(row)}: got {text!r:.60} in column {text_column!r}, expected a text")
        try:
            entities = sorted(map(_entity, spans or ()))
        except ValueError as error:
            raise ValueError(f"{table.where(row)}, column {spans_column!r}: {error}") from None
        row_words: list[str] = []
        row_tags: list[str] = []
        at = 0
        for start, end, kind in entities:
            inside = split(text[start:end])
            if not at <= start < end <= len(text) or not inside:
                problem = "overlaps the one before it" if start < at else f"of a text of {len(text)} holds no word"
                raise ValueError(
                    f"{table.where(row)}: the entity {kind!r} at characters {start} to {end} in column "
                    f"{spans_column!r} {problem}: correct it or leave it out"
                )
            before = split(text[at:start])
            row_words += before + inside
            row_tags += ["O"] * len(before) + [f"B-{kind}"] + [f"I-{kind}"] * (len(inside) - 1)
            at = end
        rest = split(text[at:])
        words.append(row_words + rest)
        tags.append(row_tags + ["O"] * len(rest))
    return words, tags


def _field(entity: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((entity[name] for name in names if entity.get(name) is not None), None)


def _entity(entity: Any) -> _Entity:
    """An entity of either form. Raises ValueError for anything else."""
    if isinstance(entity, Mapping):
        parts = [_field(entity, names) for names in (_START, _END, _TYPE)]
    else:
        parts = list(entity) if isinstance(entity, (list, tuple)) else []
    kind = parts[2] if len(parts) == 3 else None
    if isinstance(kind, list) and len(kind) == 1:
        (kind,) = kind
    if not isinstance(kind, str) or not kind or not all(type(part) is int for part in parts[:2]):
        raise ValueError(f'got the entity {entity!r:.80}, expected [start, end, type] or {{"start", "end", "label"}}')
    return parts[0], parts[1], kind
