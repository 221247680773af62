"""The first row of a csv or tsv file: whether it is a header, and the names of the columns."""

from __future__ import annotations

import re
from pathlib import Path

from modelcenter.data.schemas.column_names import ALL_TEXT_NAMES, ID_NAMES, LABEL_NAMES, PROMPT_NAMES

_OTHER_NAMES = ("source", "messages", "conversations", "conversation")
_KNOWN_NAMES = ALL_TEXT_NAMES.union(LABEL_NAMES, ID_NAMES, PROMPT_NAMES, _OTHER_NAMES)
_SHORT_NAME = re.compile(r"\w[\w.#()/-]*( [\w.#()/-]+){0,2}")
_NO_VALUE = ("na", "n/a", "none", "null", "unknown", "missing")  # for a missing number
_LOOKED_AT = 1000  # number of rows that a header is compared with


def is_header(rows: list[list[str]]) -> bool:
    """Whether the first row is a header: its values are distinct and do not recur in the column below, and either all
    are short or one of them is above a column of numbers."""
    later = rows[1 : _LOOKED_AT + 1]
    names = {i: name.strip() for i, name in enumerate(rows[0]) if name.strip()}
    if any(_is_number(name) for name in names.values()):
        return False
    if not names or any(i not in names and not _needs_no_name(later, i) for i in range(len(rows[0]))):
        return False
    known = [name.lower() in _KNOWN_NAMES for name in names.values()]
    if all(known) and len(names) > 1:
        return True
    if len(set(names.values())) < len(names):
        return False
    if any(known) and len(names) > 1:
        later = [row for row in later if row != rows[0]]  # a repeated header is reported elsewhere
    if any(row[i].strip() == name for row in later for i, name in names.items()):
        return False
    if any(known):
        return True
    if len(rows[0]) == 1:  # only a known name counts as a header; otherwise the first text of a list would be lost
        return False
    short = all(len(name) <= 40 and _SHORT_NAME.fullmatch(name) for name in names.values())
    return short or any(_is_above_numbers(name, [row[i] for row in later]) for i, name in names.items())


def column_names(path: Path, header: list[str]) -> list[str]:
    """The column names of a header; an unnamed column is called by its number. Raises ValueError if a name occurs
    twice."""
    names = [name.strip() or str(i) for i, name in enumerate(header)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}, line 1: the header names {', '.join(map(repr, sorted(twice)))} twice")
    return names


def repeated_header_error(path: Path, place: str) -> ValueError:
    """The error for a row that repeats the header."""
    return ValueError(f"{path}, {place}: the header is repeated, as in concatenated files; keep only the first")


def _needs_no_name(rows: list[list[str]], column: int) -> bool:
    """Whether a header may leave a column without a name: the first column if it numbers the rows, like an index
    written by pandas, or an empty column, as after a separator at the end of each line."""
    values = [row[column].strip() for row in rows]
    is_index = column == 0 and all(map(str.isdecimal, values)) and 2 < len(set(values)) == len(values)
    return is_index or not any(values)


def _is_above_numbers(name: str, values: list[str]) -> bool:
    """Whether the values below a text are numbers, so that the text is their name, such as "Unnamed: 0" and MRPC's "#1
    ID"."""
    filled = [value for value in values if value.strip()]
    is_name = name.lower() not in _NO_VALUE and any(map(str.isalpha, name))
    return is_name and len(filled) > 1 and all(map(_is_number, filled))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
