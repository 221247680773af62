"""The columns of a table for the roles of a task: given by the flags, used by an earlier run, or found by name."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from modelcenter.data.schemas.columns import check_columns, is_missing
from modelcenter.data.table import Table
from modelcenter.training.config import TrainConfig


def find_named(table: Table, roles: Mapping[str, tuple[str | None, Sequence[str]]]) -> dict[str, str]:
    """{role: column}, with columns that are given or found by their usual names.

    Args:
        roles: {role: (the given column or None, usual names in lower case, the likeliest first)}.

    Raises:
        ValueError: a given column does not exist, no column has a usual name of a role, or a column has two roles.
    """
    shown = ", ".join(map(repr, table.columns))
    lower = {name.lower(): name for name in reversed(table.columns)}
    found: dict[str, str] = {}
    check_columns(table, {role: given for role, (given, _) in roles.items()}, shared=True)
    for role, (given, usual) in roles.items():
        free = [lower[name] for name in usual if name in lower and lower[name] not in found.values()]
        column = given or next(iter(free), None)
        if column is None:
            raise ValueError(
                f"{role}_column: which column of {table.name} has the {role}? None is called {' or '.join(usual[:3])}; "
                f"the columns are {shown}. Give {role}_column"
            )
        if column in found.values():
            other = next(name for name, its_column in found.items() if its_column == column)
            raise ValueError(f"{role}_column: got {column!r}, which is already the column of the {other}")
        found[role] = column
    return found


def inference_columns(
    cfg: Any,
    run: TrainConfig | None,
    table: Table,
    roles: Sequence[str],
    needed: str,
    known: Collection[str] | None = None,
) -> dict[str, Any]:
    """{role: column} for new rows: those of the flags, else the run's columns if the rows have them.

    Args:
        needed: the role without which the run's columns do not apply here. known: the existing columns; None: the
            table's.
    """
    known = table.columns if known is None else known
    given = {role: cfg.column(role) for role in roles}
    if run is not None:
        usual = {role: getattr(run, f"{role}_column", None) for role in roles}
        if usual.get(needed) in known:
            given |= {role: name for role, name in usual.items() if given[role] is None and name in known}
    return given


def inference_form(cfg: Any, run: TrainConfig | None) -> str | None:
    """The form of the rows at inference: the given one ("raw": columns as they are), else the run's."""
    form = cfg.form or (None if run is None else run.form)
    return None if form == "raw" else form


def has_several_answers(table: Table, form: str | None) -> bool:
    """Whether rows of a form list all their right choices."""
    return form is not None and "answers" in table.columns


def group_column(table: Table, given: str | None, form: str | None) -> str | None:
    """The column of groups of rows that are judged together: the given one, else that of a form with groups.

    Raises:
        ValueError: the given column does not exist.
    """
    check_columns(table, {"group": given})
    return given or ("group" if form is not None and "group" in table.columns else None)


def groups_of(table: Table, column: str | None) -> np.ndarray | None:
    """The number of each row's group, int64, from 0; None: there is no such column.

    Raises:
        ValueError: a row has no group.
    """
    if column is None:
        return None
    missing = next((i for i, value in enumerate(table.columns[column]) if is_missing(value)), None)
    if missing is not None:
        raise ValueError(f"{table.where(missing)}: the row has no group in column {column!r}; give it one or remove it")
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(str(value), len(numbers)) for value in table.columns[column]], np.int64)


def strings(table: Table, name: str) -> list[str]:
    """The texts of a column.

    Raises:
        ValueError: a row has no text.
    """
    values = table.columns[name]
    missing = next((i for i, v in enumerate(values) if v is None or isinstance(v, (list, dict, bytes))), None)
    if missing is not None:
        found = "no text" if values[missing] is None else f"{values[missing]!r:.60}, expected a text,"
        raise ValueError(f"{table.where(missing)}: the row has {found} in column {name!r}")
    return [v if isinstance(v, str) else str(v) for v in values]
