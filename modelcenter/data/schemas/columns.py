"""The columns of the text, the second text and the label: given by name, or detected."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.data.schemas.column_names import ALL_TEXT_NAMES, ID_NAMES, LABEL_NAMES, TEXT_NAMES, TEXT_PAIRS
from modelcenter.data.table import Table


@dataclass(frozen=True)
class Columns:
    """Names of the columns by role."""

    text: str
    text_pair: str | None = None
    label: str | None = None


def find_columns(
    table: Table,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    *,
    labelled: bool = True,
) -> Columns:
    """Check the given columns and find the others: by their usual names, else by their values.

    The label is the column with few distinct values, the text the one with the longest strings. If several columns
    qualify, an error asks which to use.
    label: may name several columns of zeros and ones, separated by commas: `join_labels` then adds their combination.
    labelled: a label column is needed; otherwise it is None unless given.
    Raises ValueError if a given column does not exist, or a needed one cannot be found.
    """
    join_labels(table, label)
    check_columns(table, {"text": text, "text_pair": text_pair, "label": label})
    if label is None and labelled:
        label = _find_label(table, {text, text_pair})
    if text is None:
        text, found_pair = _find_text(table, {text_pair, label})
        text_pair = text_pair or found_pair
    return Columns(text, text_pair, label)


def join_labels(table: Table, label: str | None) -> None:
    """Add a column such as "toxic,threat" to a table: in each row, the names of those columns that hold a one.

    Does nothing if `label` is a column, or if one of its parts is not.

    Raises:
        ValueError: a value is neither zero nor one.
    """
    parts = () if label is None or label in table.columns else tuple(part.strip() for part in label.split(","))
    if label is None or len(parts) < 2 or not all(part in table.columns for part in parts):
        return
    joined: list[list[str]] = [[] for _ in range(len(table))]
    for part in parts:
        for row, value in enumerate(table.columns[part]):
            holds = _ZERO_OR_ONE.get(str(value).strip().lower())
            if holds is None:
                raise ValueError(
                    f"{table.where(row)}: got {value!r:.40} in column {part!r}, expected 0 or 1, because label_column "
                    f"{label} names several columns, one per label"
                )
            joined[row] += [part] * holds
    table.columns[label] = joined
    table.classes[label] = list(parts)


_ZERO_OR_ONE = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}


def check_columns(table: Table, given: Mapping[str, str | None], *, shared: bool = False) -> None:
    """Raise ValueError for a role whose column the table lacks, or for a column with two roles, unless `shared`."""
    named = {role: name for role, name in given.items() if name is not None}
    for role, name in named.items():
        if name not in table.columns:
            near = difflib.get_close_matches(name, table.columns, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if table.like is not None:  # the column was found or given for that table
                hint = f". It was chosen for {table.like}, and these data must have the same columns; rename one"
            raise ValueError(f"{role}_column: {table.name} has no column {name!r}, it has {quoted_names(table)}{hint}")
    twice = next((n for n in named.values() if list(named.values()).count(n) > 1), None)
    if twice is not None and not shared:
        raise ValueError(f"columns: {twice!r} has two roles ({', '.join(r for r, n in named.items() if n == twice)})")


def is_missing(value: Any) -> bool:
    """Whether a row has no value: None, NaN or an empty text."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def quoted_names(table: Table) -> str:
    """The names of the columns, for messages."""
    return ", ".join(map(repr, table.columns))


def find_usual_name(table: Table, names: tuple[str, ...], used: Collection[str | None]) -> str | None:
    """The column with the first of some usual names (lower case) that has no other role yet; None if there is none."""
    lower = {name.lower(): name for name in reversed(table.columns) if name not in used}
    return next((lower[name] for name in names if name in lower), None)


def _find_label(table: Table, used: set[str | None]) -> str:
    named = find_usual_name(table, LABEL_NAMES, used)
    if named is not None:
        return named
    few = max(2, min(200, len(table) // 10))
    # A text is not a label, however few rows there are, and neither is the only column of a table.
    free = [name for name in table.columns if name not in used and name.lower() not in ALL_TEXT_NAMES]
    only_one = len(table.columns) == 1
    distinct = {name: _distinct(table.columns[name], few) for name in free if not only_one}
    candidates = {name: k for name, k in distinct.items() if 2 <= k <= few}
    if len(candidates) == 1:
        return next(iter(candidates))
    why = (
        "several columns have few distinct values: " + ", ".join(f"{name!r} ({k})" for name, k in candidates.items())
        if candidates
        else f"no column is called a label or has {'2' if few == 2 else f'between 2 and {few}'} distinct values; the "
        + (f"only column is {quoted_names(table)}" if only_one else f"columns are {quoted_names(table)}")
    )
    hot = [name for name in candidates if {str(v).strip().lower() for v in table.columns[name]} <= _ZERO_OR_ONE.keys()]
    several = f", or {','.join(hot)} if rows may have several of these labels" if len(hot) > 1 else ""
    raise ValueError(f"label_column: which column of {table.name} is the label? {why}. Give label_column{several}")


def _distinct(values: list[Any], limit: int) -> int:
    """The number of distinct values, or a number above `limit` if there are more; 0 for columns that cannot be a
    label."""
    seen = set()
    for value in values:
        if isinstance(value, (list, dict)):
            return 0
        seen.add(value)
        if len(seen) > limit + 2:  # None and "" may be among them
            return len(seen)
    return len(seen - {None, ""})


def _find_text(table: Table, used: set[str | None]) -> tuple[str, str | None]:
    lower = {name.lower(): name for name in table.columns if name not in used}
    for first, second in TEXT_PAIRS:
        if first in lower and second in lower:
            return lower[first], lower[second]
    named = find_usual_name(table, TEXT_NAMES, used)
    if named is not None:
        return named, None
    lengths = {
        name: sum(map(len, strings)) / len(strings)
        for name, values in table.columns.items()
        if name not in used and name.lower() not in ID_NAMES
        if (strings := [v for v in values[:1000] if v is not None]) and all(isinstance(v, str) for v in strings)
    }
    longest = sorted(lengths, key=lambda name: -lengths[name])
    if not longest:
        raise ValueError(f"text_column: {table.name} has no column of texts; the columns are {quoted_names(table)}")
    if len(longest) > 1 and lengths[longest[0]] < 3 * lengths[longest[1]]:
        shown = ", ".join(f"{name!r} ({lengths[name]:.0f} characters on average)" for name in longest)
        raise ValueError(
            f"text_column: which column of {table.name} is the text? It could be {shown}. "
            f"Give text_column (and text_pair_column)"
        )
    return longest[0], None
