"""Rows with a source and a target text: their columns and their texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from modelcenter.data.schemas.column_names import TEXT_NAMES
from modelcenter.data.schemas.columns import check_columns
from modelcenter.data.table import Table

# Usual names of source and target, the least ambiguous first.
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
    """Names of the columns. source_lang, target_lang: keys in a column of translations, {"en": ..., "de": ...}."""

    source: str
    target: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None

    def roles(self, source_lang: str | None, target_lang: str | None) -> dict[str, str | None]:
        """The columns by role, for flags that also give these languages: the key of a translation if it is not the
        language."""
        named = (
            ("source", self.source, self.source_lang, source_lang),
            ("target", self.target, self.target_lang, target_lang),
        )
        return {role: column if key in (None, lang) else key for role, column, key, lang in named}

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
    """Check the given columns and find the others by their usual names.

    source, target: columns, or keys in a column of translations. source_lang, target_lang: given together: such keys,
    or names of columns, unless source and target are given.
    labelled: a target is needed; otherwise it is None unless given.

    Raises:
        ValueError: a given column does not exist, or a needed one cannot be found.
    """
    translations = next(
        (n for n in table.columns if n.lower() in _TRANSLATIONS and _holds_objects(table.columns[n])), None
    )
    if translations is not None:
        known = translation_keys(table)
        if source not in table.columns and source in known:
            source, source_lang = translations, source
        if target not in table.columns and target in known:
            target, target_lang = translations, target
    check_columns(table, {"source": source, "target": target}, shared=True)
    if source is None and target is None and translations is not None:
        source, target = translations, translations if labelled else None
    if (
        source is None
        and target is None
        and source_lang in table.columns
        and (not labelled or target_lang in table.columns)
    ):
        source, target = source_lang, target_lang if labelled else None
    if source is None or (target is None and labelled):
        source, target = _find_pair(table, source, target, labelled)
    keys = [
        lang if name is not None and _holds_objects(table.columns[name]) else None
        for name, lang in ((source, source_lang), (target, target_lang))
    ]
    for role, name, lang in zip(("source", "target"), (source, target), keys, strict=True):
        if name is not None and _holds_objects(table.columns[name]):
            known = _keys(table.columns[name])
            if lang not in known:
                came = "is needed" if lang is None else f"got {lang!r}"
                raise ValueError(
                    f"{role}_lang: {came}: column {name!r} of {table.name} holds {', '.join(known)}; give source_lang "
                    "and target_lang or, if the tokenizer has other names for these languages, the keys as "
                    "source_column and target_column"
                )
    if target is not None and (source, keys[0]) == (target, keys[1]):
        raise ValueError(f"columns: {source!r} is both source and target; give source_column and target_column")
    return PairColumns(source, target, *keys)


def translation_keys(table: Table) -> list[str]:
    """The languages in columns of translations, {"en": ..., "de": ...}: the keys in the first rows."""
    return _keys([v for name, held in table.columns.items() if name.lower() in _TRANSLATIONS for v in held[:100]])


def _keys(values: list[Any]) -> list[str]:
    return sorted({key for value in values[:100] if isinstance(value, dict) for key in value})


def _holds_objects(values: list[Any]) -> bool:
    return isinstance(next((value for value in values if value is not None), None), dict)


def _find_pair(table: Table, source: str | None, target: str | None, labelled: bool) -> tuple[str, str | None]:
    lower = {name.lower(): name for name in reversed(table.columns)}
    for first, second in PAIRS:
        a, b = source or lower.get(first), (target or lower.get(second)) if labelled else target
        if a is not None and (b is not None or not labelled) and a != b:
            return a, b
    others = [name for name in table.columns if name not in (source, target)]
    if not labelled:
        named = next((lower[name] for name in TEXT_NAMES if name in lower), None)
        if named is not None or len(others) == 1:
            return named or others[0], target
    elif len(others) == 1 and (source is not None or target is not None):
        return source or others[0], target or others[0]
    role = "source" if source is None else "target"
    raise ValueError(
        f"{role}_column: which column of {table.name} is the {role}? It has {', '.join(map(repr, table.columns))}, "
        "none of them a usual name. Give source_column" + (" and target_column" if labelled else "")
    )


def column_texts(table: Table, column: str, lang: str | None = None) -> Iterator[str | None]:
    """The texts of a column, or of one language in a column of translations; None if a row has none.

    Raises:
        ValueError: a row holds something else.
    """
    for row, cell in enumerate(table.columns[column]):
        value = cell.get(lang) if lang is not None and isinstance(cell, dict) else cell
        if isinstance(value, (list, dict, bytes)) or (lang is not None and isinstance(cell, str)):
            expected = "a text" if lang is None else f"texts by language, one of them {lang}"
            raise ValueError(f"{table.where(row)}: the row has {cell!r:.60}, expected {expected}, in column {column!r}")
        yield value if value is None or isinstance(value, str) else str(value)
