"""Names of classes and their numbers (ids), which differ between data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def match_order(names: Sequence[str], reference: Sequence[str] | None) -> tuple[str, ...] | None:
    """The names in the order of `reference`, ignoring case; None if `reference` has other names."""
    by_lower = {name.lower(): name for name in names}
    if reference is None or len(by_lower) < len(names) or sorted(map(str.lower, reference)) != sorted(by_lower):
        return None
    return tuple(by_lower[name.lower()] for name in reference)


def renumbering(names: Sequence[str], reference: Sequence[str] | None) -> tuple[tuple[str, ...], np.ndarray] | None:
    """The names in the order of `reference`, and the new id of each old id, int64 (names,).

    None if the order is the same already, or `reference` has other names.
    """
    order = match_order(names, reference)
    if order is None or order == tuple(names):
        return None
    return order, np.array([order.index(name) for name in names])


def renumbered(targets: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Targets, (rows,) ids or (rows, classes), with the new ids of the classes, `numbers` (classes,)."""
    return targets[:, np.argsort(numbers)] if targets.ndim == 2 else numbers[targets]


def reordered_ids_to_names(values: Sequence[Any], classes: Sequence[str] | None, names: Sequence[str]) -> Sequence[Any]:
    """The values of a source whose ids mean `classes`: as names if it numbers the classes of `names` differently,
    otherwise unchanged."""
    order = match_order(names, classes)
    return values if order is None or order == tuple(names) else ids_to_names(values, order)


def ids_to_names(values: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The names of class ids (or of lists of these); other values unchanged."""

    def name_of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [name_of(v) for v in value]
        return names[value] if type(value) is int and 0 <= value < len(names) else value

    return [name_of(value) for value in values]
