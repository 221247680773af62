"""Rows as a text to read and a text to write: which columns hold them, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from modelcenter.data.schemas.column_names import TEXT_NAMES
from modelcenter.data.schemas.columns import check_columns
from modelcenter.data.table import Table

# Usual names, source and target; what is surer comes first.
PAIRS = (
    ("source", "target"), ("src", "tgt"), ("source_text", "target_text"), ("inputs", "targets"), ("input", "target"),
    ("document", "summary"), ("article", "highlights"), ("article", "summary"), ("article", "abstract"),
    ("dialogue", "summary"), ("description", "abstract"), ("text", "summary"), ("content", "summary"),
    ("body", "summary"), ("document", "title"), ("article", "title"), ("content", "title"), ("text", "title"),
    ("body", "title"), ("mr", "ref"), ("meaning_representation", "human_reference"),
    ("meaning_representation", "target"), ("text", "target"), ("question", "answer"), ("input", "output"),
)  # fmt: skip
_TRANSLATIONS = ("translation", "translations")


@dataclass(frozen=True)
class PairColumns:
    """Names of the columns. source_lang, target_lang: keys of a column of translations, {"en": ..., "de": ...}."""

    source: str
    target: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None

    def shown(self) -> str:
        """In words: "source 'mr', target 'ref'"."""
        source, target = (
            None if name is None else f"{name!r}" + (f"[{lang!r}]" if lang is not None else "")
            for name, lang in ((self.source, self.source_lang), (self.target, self.target_lang))
        )
        return f"source {source}" + (f", target {target}" if target is not None else "")


def find_pair_columns(
    table: Table,
    source: str | None = None,
    target: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    *,
    labelled: bool = True,
) -> PairColumns:
    """Check the columns given and find the others by their usual names.

    source_lang, target_lang: given together; keys of a column of translations, else names of columns.
    labelled: a target is needed; otherwise it stays None unless given.

    Raises:
        ValueError: a given column is not there, or one that is needed cannot be told.
    """
    check_columns(table, {"source": source, "target": target}, shared=True)
    several = next((n for n in table.columns if n.lower() in _TRANSLATIONS and _is_mapping(table.columns[n])), None)
    if source is None and target is None and several is not None:
        source, target = several, several if labelled else None
    if (
        source is None
        and target is None
        and source_lang in table.columns
        and (not labelled or target_lang in table.columns)
    ):
        source, target = source_lang, target_lang if labelled else None
    if source is None or (target is None and labelled):
        source, target = _by_names(table, source, target, labelled)
    keys = [
        lang if name is not None and _is_mapping(table.columns[name]) else None
        for name, lang in ((source, source_lang), (target, target_lang))
    ]
    for role, name, lang in zip(("source", "target"), (source, target), keys, strict=True):
        if name is not None and _is_mapping(table.columns[name]):
            known = sorted({key for value in table.columns[name][:100] if isinstance(value, dict) for key in value})
            if lang not in known:
                came = "is needed" if lang is None else f"got {lang!r}"
                raise ValueError(
                    f"{role}_lang: {came}: column {name!r} of {table.name} holds {', '.join(known)}; give source_lang "
                    "and target_lang"
                )
    if target is not None and (source, keys[0]) == (target, keys[1]):
        raise ValueError(f"columns: {source!r} is both source and target; give source_column and target_column")
    return PairColumns(source, target, *keys)


def _is_mapping(values: list[Any]) -> bool:
    return isinstance(next((value for value in values if value is not None), None), dict)


def _by_names(table: Table, source: str | None, target: str | None, labelled: bool) -> tuple[str, str | None]:
    lower = {name.lower(): name for name in reversed(table.columns)}
    for first, second in PAIRS:
        found = source or lower.get(first), (target or lower.get(second)) if labelled else target
        if found[0] is not None and (found[1] is not None or not labelled) and found[0] != found[1]:
            return found
    others = [name for name in table.columns if name not in (source, target)]
    if not labelled:
        named = next((lower[name] for name in TEXT_NAMES if name in lower), None)
        if named is not None or len(others) == 1:
            return named or others[0], target
    elif len(others) == 1 and (source is not None or target is not None):
        return source or others[0], target or others[0]
    role = "source" if source is None else "target"
    raise ValueError(
        f"{role}_column: which column of {table.name} is the {role}? It has {', '.join(map(repr, table.columns))}, and "
        "none of the usual names. Give source_column" + (" and target_column" if labelled else "")
    )


def texts_of(table: Table, column: str, lang: str | None = None) -> Iterator[str | None]:
    """The texts of a column, or of one language of a column of translations; None where a row has none.

    Raises:
        ValueError: a row that holds something else.
    """
    for row, found in enumerate(table.columns[column]):
        value = found.get(lang) if lang is not None and isinstance(found, dict) else found
        if isinstance(value, (list, dict, bytes)) or (lang is not None and isinstance(found, str)):
            expected = "a text" if lang is None else f"texts by language, one of them {lang}"
            raise ValueError(
                f"{table.where(row)}: the row has {found!r:.60}, expected {expected}, in column {column!r}"
            )
        yield value if value is None or isinstance(value, str) else str(value)
