"""json, jsonl and ndjson: one object per line, arrays, tables as written by pandas, SQuAD's nested questions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelcenter.data.readers.literals import pandas_columns, parse_json, parse_objects
from modelcenter.data.readers.parsed import ParsedFile, columns_of
from modelcenter.data.readers.squad import flatten_questions, is_nested
from modelcenter.data.readers.text_encoding import decode_text
from modelcenter.data.schemas.column_names import ALL_TEXT_NAMES, PROMPT_NAMES, TOOLS_NAMES

_BLOCK = 100  # number of lines parsed at once
_ROWS = frozenset(("data", "rows", "examples"))  # other lists may be beside it
_WORD_LISTS = frozenset(("words", "tokens"))  # columns that hold a list in each row
_MESSAGE_KEYS = ({"role", "content"}, {"from", "value"})  # keys of a message in a conversation


def read_json(path: Path, raw: bytes) -> ParsedFile:
    """JSON lines, an array of objects or of lists of equal length, {column: [values]}, an object with one list of
    objects ({"data": [...]}), or a table as written by pandas.

    If objects are nested as in SQuAD (see `squad`), each question becomes a row.
    """
    text = decode_text(path, raw)
    if text.lstrip()[:1] == "[":
        return ParsedFile(_array_columns(path, text))
    lines: Sequence[int] | None = None
    try:
        parsed = _parse_lines(path, text)
    except ValueError as error:
        try:
            document = parse_json(text)  # one object on many lines
        except ValueError:
            raise error from None
        if not isinstance(document, dict):
            raise
    else:
        lines = parsed.lines
        if lines is None or len(lines) != 1 or not _WORD_LISTS.isdisjoint(parsed.columns):
            return parsed
        document = {name: values[0] for name, values in parsed.columns.items()}
    return _single_object(path, document, lines)


def _array_columns(path: Path, text: str) -> dict[str, list[Any]]:
    try:
        rows = parse_json(text)
    except json.JSONDecodeError as error:
        several = "; expected one array, or one JSON object per line" if error.msg == "Extra data" else ""
        raise ValueError(
            f"{path}, line {error.lineno}: not valid JSON ({error.msg}, column {error.colno}){several}"
        ) from None
    if rows and all(isinstance(row, list) and len(row) == len(rows[0]) > 0 for row in rows):
        return {str(i): list(values) for i, values in enumerate(zip(*rows, strict=True))}
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected one JSON object per line, or an array of objects")
    return _object_columns(path, rows)


def _object_columns(path: Path, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return columns_of(flatten_questions(path, rows) if is_nested(rows) else rows)


def _single_object(path: Path, document: dict[str, Any], lines: Sequence[int] | None) -> ParsedFile:
    """A file with one object: a table in one of several layouts, otherwise the only row."""
    table = pandas_columns(document)
    if table is not None:
        return ParsedFile(table)
    lists = {name: value for name, value in document.items() if isinstance(value, list)}
    tables = {name: value for name, value in lists.items() if value and all(isinstance(row, dict) for row in value)}
    has_tools = len(document) > 1 and any(name.lower() in TOOLS_NAMES for name in tables)
    # An instruction next to a list of rows applies to all of them.
    text_names = ALL_TEXT_NAMES.union(PROMPT_NAMES) if _ROWS.isdisjoint(document) else ALL_TEXT_NAMES
    texts = [name for name, value in document.items() if isinstance(value, str) and name.lower() in text_names]
    is_chat = any(keys <= row.keys() for table in tables.values() for row in table for keys in _MESSAGE_KEYS)
    is_columns = len(lists) == len(document) > 0 and len({len(value) for value in lists.values()}) == 1
    if not texts and not is_chat:  # otherwise it is a row with answers or entities, or a conversation
        one_of_columns = is_columns and len(lists) > 1 and _ROWS.isdisjoint(document)  # these may hold objects
        if len(tables) == 1 and not one_of_columns and not has_tools:
            return ParsedFile(_object_columns(path, *tables.values()))
        if is_columns:
            return ParsedFile(document)
    return ParsedFile({name: [value] for name, value in document.items()}, lines)


def _parse_lines(path: Path, text: str) -> ParsedFile:
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    # Not splitlines(): JSON strings may contain U+2028 and other line separators unescaped.
    numbered = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line and not line.isspace())
    while block := list(itertools.islice(numbered, _BLOCK)):
        found = parse_objects([line for _, line in block])
        rows += [_parse_line(path, *each) for each in block] if found is None else found
        numbers += [number for number, _ in block]
    return ParsedFile(columns_of(rows), numbers)


def _parse_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except json.JSONDecodeError as error:
        shown = line.strip() if len(line) < 80 else line.strip()[:77] + "..."
        raise ValueError(
            f"{path}, line {number}: not valid JSON ({error.msg}, column {error.colno}): {shown}"
        ) from None
    if not isinstance(row, dict):
        raise ValueError(
            f"{path}, line {number}: got {line.strip()[:60]}, "
            'expected a JSON object such as {"text": ..., "label": ...}'
        )
    return row
