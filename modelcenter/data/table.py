"""Rows in columns, with the file and line of each row."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from modelcenter.data.schemas.class_names import ids_to_names, match_order


@dataclass(frozen=True)
class Origin:
    """One source file (or Hub split) of a table: `rows` rows, row i at line `lines[i]` if the format has lines.

    part: the split and its rows in the table, as given by the user (train[:1000]); None: all rows.
    """

    path: str
    rows: int
    sha256: str
    lines: Sequence[int] | None = None
    part: str | None = None


class Share(NamedTuple):
    """One part of a mixture: its name, the rows of its origins, and its weight."""

    name: str
    rows: int
    weight: float


@dataclass
class Table:
    """Rows as named columns of equal length, and where each row came from.

    columns: name -> list of `len(self)` values (str, int, float, bool, list or None).
    classes: class names of integer columns, if the source has them (Hub ClassLabel features).
    index: int64 (rows,), the index of each row among the concatenated rows of the origins; None: the same index.
    shares: the parts of a mixture (see mixture.mixed), in the order of the origins.
    like: the name of the table whose columns this one must have, for messages; None: there is none.
    """

    columns: dict[str, list[Any]]
    origins: list[Origin]
    classes: dict[str, list[str]] = field(default_factory=dict)
    index: np.ndarray | None = None
    shares: Sequence[Share] = ()
    like: str | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of each origin, and the end of the last."""
        return list(itertools.accumulate((origin.rows for origin in self.origins), initial=0))

    @property
    def origin_rows(self) -> int:
        """The number of rows of all origins; a table may have fewer of them, or some several times."""
        return sum(origin.rows for origin in self.origins)

    @property
    def name(self) -> str:
        """The name of the table in messages: its first file, and how many more there are."""
        files = sum(origin.rows > 0 for origin in self.origins)
        more = f" and {files - 1} more" if files > 1 else ""
        return f"{self.origins[0].path}{more}" if self.origins else "the data"

    def where(self, row: int) -> str:
        """The file and line of a row: "train.tsv, line 12"."""
        row = int(row if self.index is None else self.index[row])
        starts = self._starts
        place = bisect_right(starts, row) - 1
        origin, row = self.origins[place], row - starts[place]
        return f"{origin.path}, row {row + 1}" if origin.lines is None else f"{origin.path}, line {origin.lines[row]}"

    def take(self, rows: np.ndarray) -> Table:
        """The table of the given rows, in that order."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        rows = rows if self.index is None else self.index[rows]
        return Table(columns, self.origins, self.classes, rows, self.shares)

    def subset(self, rows: np.ndarray) -> Table:
        """The table of the given rows, each once and in order; itself, if these are all."""
        return self if len(rows) == len(self) else self.take(rows)

    def part_of_rows(self) -> np.ndarray:
        """The part of a mixture that each row belongs to, int64 (rows,)."""
        ends = np.cumsum([part.rows for part in self.shares])
        return np.searchsorted(ends, np.arange(len(self)) if self.index is None else self.index, side="right")

    def fingerprint(self) -> dict[str, Any]:
        """The record of the data in a run's summary: rows, the SHA-256 of each file, the rows of a split if only some
        are used, and the weights of a mixture."""
        about = {"rows": len(self), "sha256": {origin.path: origin.sha256 for origin in self.origins}}
        if parts := dict.fromkeys(origin.part for origin in self.origins if origin.part is not None):
            about["split"] = ", ".join(parts)
        return about | ({"weights": [part.weight for part in self.shares]} if self.shares else {})


def concatenate(tables: list[Table]) -> Table:
    """One table of all rows; a column that a table lacks holds None for its rows.

    If the tables number the classes of a column differently, the column holds names instead of ids.
    """
    if len(tables) == 1:
        return tables[0]
    names = dict.fromkeys(name for table in tables for name in table.columns)
    parts = {n: [t.columns[n] if n in t.columns else [None] * len(t) for t in tables] for n in names}
    classes: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for table in tables for name in table.classes):
        parts[name], shared = _unify_classes(parts[name], [table.classes.get(name) for table in tables])
        if shared is not None:
            classes[name] = shared
    columns = {name: [value for part in column for value in part] for name, column in parts.items()}
    starts = itertools.accumulate((table.origin_rows for table in tables), initial=0)
    index = None
    if any(table.index is not None for table in tables):
        indices = [np.arange(len(table)) if table.index is None else table.index for table in tables]
        index = np.concatenate([rows + start for rows, start in zip(indices, starts, strict=False)])
    return Table(columns, [origin for table in tables for origin in table.origins], classes, index)


def _unify_classes(parts: list[list[Any]], classes: list[list[str] | None]) -> tuple[list[list[Any]], list[str] | None]:
    """Give the ids in a column the same meaning in several tables.

    Returns (the column in each table, the class names). Ids are kept if they mean the same in all tables; otherwise
    they become names, and the class names are None unless all tables have the same ones (then in the first's order).
    """
    first, *others = (names for names in classes if names is not None)
    unnamed = [part for part, names in zip(parts, classes, strict=True) if names is None]
    only_ids = not any(_is_class_name(value, first or []) for part in unnamed for value in part)
    if only_ids and all(names == first for names in others):
        return parts, first
    unified = []
    for part, names in zip(parts, classes, strict=True):
        if names is not None:
            # The Hub marks a row without a label by -1.
            part = [None if value == -1 else value for value in ids_to_names(part, match_order(first, names) or names)]
        unified.append(part)
    same = only_ids and all(match_order(first, names) is not None for names in others)
    return unified, first if same else None


def _is_class_name(value: Any, names: list[str]) -> bool:
    """Whether a label is the name of a class and not an id; in csv files ids are also strings."""
    return isinstance(value, str) and (value.strip() in names or re.fullmatch(r"\s*(\d+(\.0)?)?\s*", value) is None)
