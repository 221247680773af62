"""Values as people's programs write them into files of text: lists in the cells of a table, tables and NaN in JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_ARRAY_ITEM = r"""(?:[-+]?\d+\.?\d*|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_IN_OBJECT = re.compile(r"array\((\[.*?\])(?:,\s*dtype=[\w.<>']+)?\)", re.DOTALL)
_ARRAY = re.compile(rf"\[\s*{_ARRAY_ITEM}(?:\s+{_ARRAY_ITEM})+\s*\]")


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name.replace("Infinity", "inf"))


_decode = json.JSONDecoder(parse_constant=_constant).decode
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half a character: two make one
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F])|.)", re.DOTALL)


def from_json(text: str) -> Any:
    """json.loads, but that a NaN is no value: what a pandas row without one becomes, which would be read as the text
    "nan".

    Raises:
        JSONDecodeError: no JSON, or a text cut in the middle of a character, as which it can be neither tokenised nor
            written.
    """
    if _SURROGATE.search(text):
        half = next((found for found in _ESCAPE.finditer(text) if found[1]), None)
        if half is not None:
            cut = text[half.start() : half.start() + 6]
            raise json.JSONDecodeError(f"{cut} is half a character; remove it or write \\ufffd", text, half.start())
    return _decode(text)


def as_list(text: str) -> list[Any] | None:
    """The list that a text spells, as JSON, Python or numpy writes it: '["a"]', "['a', None]", "[0 1]"; None: none."""
    text = text.strip()
    if text[:1] != "[" or text[-1:] != "]":
        return None
    if _ARRAY.fullmatch(text):  # Python would join texts that no comma parts
        text = f"[{','.join(re.findall(_ARRAY_ITEM, text))}]"
    found = _spelt(text)
    return found if isinstance(found, list) else None


def as_object(text: str) -> dict[str, Any] | None:
    """The object that a text spells, as JSON or Python writes it, with numpy's arrays in it or without; None: none."""
    text = text.strip()
    if text[:1] != "{" or text[-1:] != "}":
        return None
    found = _spelt(text)
    if found is None:
        found = _spelt(_IN_OBJECT.sub(r"\1", text))
    return found if isinstance(found, dict) else None


def _spelt(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None


def lists_of(values: Sequence[Any]) -> Sequence[Any]:
    """The values of a column, as lists where every text in it spells one; else as they are."""
    texts = {value for value in values if isinstance(value, str) and value.strip()}
    lists = {text: as_list(text) for text in texts if next(iter(texts)).lstrip()[:1] == "["}
    if not lists or None in lists.values():
        return values
    return [lists.get(value, value) if isinstance(value, str) else value for value in values]


def pandas_columns(whole: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """The columns of a JSON object that `DataFrame.to_json` writes: {column: {row: value}}, which it does unless told
    otherwise, {row: {column: value}}, or {"columns": [...], "data": [[...]]}; None: it is another object."""
    names, rows = whole.get("columns"), whole.get("data")
    if isinstance(names, list) and isinstance(rows, list):
        if not all(isinstance(row, list) and len(row) == len(names) for row in rows):
            return None
        return {str(name): [row[i] for row in rows] for i, name in enumerate(names)}
    parts = list(whole.values())
    if not parts or not all(isinstance(part, dict) and part.keys() == parts[0].keys() for part in parts):
        return None
    if parts[0] and all(map(str.isdecimal, parts[0])):
        return {name: list(part.values()) for name, part in whole.items()}
    if all(map(str.isdecimal, whole)):
        return {name: [part[name] for part in parts] for name in parts[0]}
    return None
