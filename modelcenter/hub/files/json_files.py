"""JSON files of a checkpoint. Imports no torch."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file is not readable, not JSON, or not an object.
    """
    value = _parse(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """Read a JSON list of objects. Raises ValueError if the file is not readable, not JSON, or not such a list."""
    value = _parse(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{path} holds {value!r:.80}, expected a list of objects")
    return value


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON. Parts of a path that are not UTF-8 are escaped, so that it reads back unchanged."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for json. Raises ValueError if a key occurs twice."""
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} occurs twice")
    return names
