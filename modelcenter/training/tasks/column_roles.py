"""Columns that are known by their usual names."""

from collections.abc import Mapping, Sequence

from modelcenter.data.schemas.columns import check_columns
from modelcenter.data.table import Table


def find_named(table: Table, roles: Mapping[str, tuple[str | None, Sequence[str]]]) -> dict[str, str]:
    """{role: column}.

    Args:
        roles: {role: (the column that was given or None, usual names in lower case, the likeliest first)}.

    Raises:
        ValueError: a given column that is not there, a role for which no usual name is there, a column of two roles.
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
            other = next(name for name, taken in found.items() if taken == column)
            raise ValueError(f"{role}_column: got {column!r}, which is the column of the {other} already")
        found[role] = column
    return found
