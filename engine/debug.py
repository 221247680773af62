"""A store of values by name, for debugging from any depth of a model: BMTrain's ``debug``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_values: dict[str, Any] = {}


def set(key: str, value: Any) -> None:
    """Keep ``value``; a tensor as a copy on the CPU, without its graph."""
    _values[key] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def get(key: str, default: Any = None) -> Any:
    """What is kept under ``key``."""
    return _values.get(key, default)


def append(key: str, value: Any) -> None:
    """Add ``value`` to the list under ``key``."""
    _values.setdefault(key, []).append(value)


def extend(key: str, values: Iterable[Any]) -> None:
    """Add ``values`` to the list under ``key``."""
    _values.setdefault(key, []).extend(values)


def clear(key: str | None = None) -> None:
    """Forget what is under ``key``, or everything."""
    if key is None:
        _values.clear()
    else:
        _values.pop(key, None)
