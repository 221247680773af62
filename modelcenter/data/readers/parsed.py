"""The result of a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple


class ParsedFile(NamedTuple):
    """The content of a file.

    columns: name -> values, one per row. lines: the line at which each row begins, from 1; None if the format has no
    lines. classes: class names of integer columns, if the file has them.
    """

    columns: dict[str, list[Any]]
    lines: Sequence[int] | None = None
    classes: Mapping[str, list[str]] = MappingProxyType({})


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Objects as columns, with None where an object lacks the key."""
    names = dict.fromkeys(chain.from_iterable(rows))
    return {name: [row.get(name) for row in rows] for name in names}
