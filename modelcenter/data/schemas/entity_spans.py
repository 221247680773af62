"""Entities said by the characters of a text, as tools for annotation write them, to words with tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelcenter.data.table import Table

_START, _END = ("start", "start_offset", "begin"), ("end", "end_offset")
_TYPE = ("label", "type", "tag", "entity", "labels")


def holds_spans(values: Sequence[Any]) -> bool:
    """Whether a column has such entities: lists of [start, end, type] or of {"start", "end", "label"}."""
    first = next((value for value in values if value), None)
    if not isinstance(first, (list, tuple)):
        return False
    if isinstance(first[0], Mapping):
        return _field(first[0], _START) is not None and _field(first[0], _END) is not None
    return isinstance(first[0], (list, tuple))


def spell_out(table: Table, text: str, spans: str, split: Callable[[str], list[str]]) -> None:
    """Put words in the place of the texts of a table, and BIO tags in the place of their entities.

    A word ends where an entity does. Characters are counted from 0, the end of an entity is the one behind it.

    Args:
        split: a text into words.

    Raises:
        ValueError: a row without a text; an entity that is none, lies outside its text, holds no word or overlaps
            another.
    """
    words, tags = [], []
    for row, (said, found) in enumerate(zip(table.columns[text], table.columns[spans], strict=True)):
        if not isinstance(said, str):
            raise ValueError(f"{table.where(row)}: got {said!r:.60} in column {text!r}, expected a text")
        own: list[str] = []
        named: list[str] = []
        at = 0
        try:
            entities = sorted(map(_entity, found or ()))
        except ValueError as error:
            raise ValueError(f"{table.where(row)}, column {spans!r}: {error}") from None
        for start, end, kind in entities:
            inside = split(said[start:end])
            if not at <= start < end <= len(said) or not inside:
                problem = "overlaps the one before it" if start < at else f"of a text of {len(said)} holds no word"
                raise ValueError(
                    f"{table.where(row)}: the entity {kind!r} at characters {start} to {end} in column {spans!r} "
                    f"{problem}: correct it or leave it out"
                )
            before = split(said[at:start])
            own += before + inside
            named += ["O"] * len(before) + [f"B-{kind}"] + [f"I-{kind}"] * (len(inside) - 1)
            at = end
        rest = split(said[at:])
        words.append(own + rest)
        tags.append(named + ["O"] * len(rest))
    table.columns[text], table.columns[spans] = words, tags


def _field(entity: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((entity[name] for name in names if entity.get(name) is not None), None)


def _entity(entity: Any) -> tuple[int, int, str]:
    """(start, end, type). Raises ValueError: it is none."""
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
