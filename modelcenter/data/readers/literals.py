"""Values that programs write as text: lists and objects in the cells of a table, tables and NaN in JSON."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ARRAY_ITEM = r"""(?:[-+]?\d+\.?\d*(?:e[-+]\d+)?|True|False|None|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_ARRAY_CALL = re.compile(r"array\((\[.*?\])(?:,\s*dtype=[\w.<>']+)?\)", re.DOTALL)
_ARRAY = re.compile(rf"\[\s*{_ARRAY_ITEM}(?:\s+{_ARRAY_ITEM})+\s*\]")
# A text in an array of objects, or the gap between two of them.
_BETWEEN_OBJECTS = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<=\})\s+(?=\{)""", re.DOTALL)


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name.replace("Infinity", "inf"))


_MARK = secrets.token_hex(8)  # a text that occurs in no file, put between lines that are parsed at once
_BETWEEN = f',"{_MARK}",'
_decode = json.JSONDecoder(parse_constant=_constant).decode
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a surrogate pair
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F])|.)", re.DOTALL)


def parse_json(text: str) -> Any:
    """json.loads, but NaN becomes None: pandas writes it for a missing value, and it would be read as the text "nan".

    Raises:
        JSONDecodeError: not JSON; a text has half of a surrogate pair, which can be neither tokenised nor written; or a
            limit of Python is exceeded (numbers of thousands of digits, lists nested thousands deep).
    """
    _check_halves(text)
    return _parse_whole(text)


def _check_halves(text: str) -> None:
    if not _SURROGATE.search(text):
        return
    half = next((match for match in _ESCAPE.finditer(text) if match[1]), None)
    if half is not None:
        escape = text[half.start() : half.start() + 6]
        raise json.JSONDecodeError(f"{escape} is half a character; remove it or write \\ufffd", text, half.start())


def _parse_whole(text: str) -> Any:
    try:
        return _decode(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError):  # they say neither what is too large nor where
        raise json.JSONDecodeError("a number has too many digits, or lists are too deep", text, 0) from None


def parse_objects(lines: Sequence[str]) -> list[dict[str, Any]] | None:
    """The JSON object of each line, parsed all at once, which is nearly twice as fast; None if some line may not be an
    object, which `parse_json` of each line then finds."""
    text = f"[{_BETWEEN.join(lines)}]"
    try:
        if _SURROGATE.search(text):
            for line in lines:
                _check_halves(line)
        values = _parse_whole(text)
    except json.JSONDecodeError:
        return None
    # Lines that are not values, such as `{"a": 1` and `"b": 2}`, may form one together: then a mark is missing.
    rows, marks = values[::2], values[1::2]
    return rows if marks == [_MARK] * (len(lines) - 1) and set(map(type, rows)) == {dict} else None


def parse_list(text: str) -> list[Any] | None:
    """The list that a text represents in JSON, Python or numpy: '["a"]', "['a', None]", "[0 1]", "[{} {}]"; None if it
    is not a list."""
    text = text.strip()
    if text[:1] != "[" or text[-1:] != "]":
        return None
    if _ARRAY.fullmatch(text):  # Python would join texts without a comma between them
        text = f"[{','.join(re.findall(_ARRAY_ITEM, text))}]"
    value = _parse_literal(text)
    if value is None and text[1:].lstrip()[:1] == "{":
        value = _parse_literal(_BETWEEN_OBJECTS.sub(lambda match: match[1] or ", ", text))
    return value if isinstance(value, list) else None


def parse_object(text: str) -> dict[str, Any] | None:
    """The object that a text represents in JSON or Python, perhaps with numpy arrays in it; None if it is not an
    object."""
    text = text.strip()
    if text[:1] != "{" or text[-1:] != "}":
        return None
    value = _parse_literal(text)
    if value is None:
        value = _parse_literal(_ARRAY_CALL.sub(r"\1", text))
    return value if isinstance(value, dict) else None


def _parse_literal(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None


def parse_lists(values: Sequence[Any], where: Callable[[int], str]) -> Sequence[Any]:
    """The values of a column, as lists if every text in it represents one; otherwise unchanged.

    where: gives the location of a row, for messages.

    Raises:
        ValueError: every text is in brackets, but only some represent lists.
    """
    texts = dict.fromkeys(value for value in values if isinstance(value, str) and value.strip())
    if not texts or not all(text.strip()[:1] == "[" and text.strip()[-1:] == "]" for text in texts):
        return values
    lists = {text: parse_list(text) for text in texts}
    wrong = next((text for text, found in lists.items() if found is None), None)
    if wrong is None:
        return [lists.get(value, value) if isinstance(value, str) else value for value in values]
    right = next((text for text, found in lists.items() if found is not None), None)
    if right is not None:
        place = where(list(values).index(wrong))
        raise ValueError(
            f"{place}: got {wrong!r:.60}, expected a list as written by JSON, Python or numpy, such as {right!r:.60} "
            "in another row; correct it or remove the row"
        )
    return values


def pandas_columns(document: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """The columns of a JSON object written by `DataFrame.to_json`; None if it is another object.

    Its layouts: {column: {row: value}} (the default), {row: {column: value}}, {"columns": [...], "data": [[...]]}.
    """
    names, rows = document.get("columns"), document.get("data")
    if isinstance(names, list) and isinstance(rows, list):
        if not all(isinstance(row, list) and len(row) == len(names) for row in rows):
            return None
        return {str(name): [row[i] for row in rows] for i, name in enumerate(names)}
    parts = list(document.values())
    if not parts or not all(isinstance(part, dict) and part.keys() == parts[0].keys() for part in parts):
        return None
    if parts[0] and all(map(str.isdecimal, parts[0])):
        return {name: list(part.values()) for name, part in document.items()}
    if all(map(str.isdecimal, document)):
        return {name: [part[name] for part in parts] for name in parts[0]}
    return None
