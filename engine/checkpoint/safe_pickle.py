"""Values as bytes that torch reads back without running code; anything else is refused when it is written."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

_UNSAFE = (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError)


def dump(value: Any) -> bytes:
    """``value`` as ``load`` reads it. Raises ValueError, which names the place in it, for what cannot be read back."""
    try:
        return _pickled(value)
    except _UNSAFE as error:
        raise ValueError(
            f"{_first_unsafe(value)} cannot be read back safely: give numbers, strings, tensors, lists, tuples and "
            "dicts of Python and torch"
        ) from error


def load(path: Path) -> Any:
    """The value in a file that ``dump`` made, its tensors on the CPU. Raises ValueError, which names the file."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file fails in every way there is; each is reported with its cause
        raise ValueError(f"{path} cannot be read: {error}") from error


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    torch.load(io.BytesIO(file.getvalue()), weights_only=True, map_location="cpu")
    return file.getvalue()


def _first_unsafe(value: Any, name: str = "") -> str:
    """The first thing in ``value`` that cannot be read back safely: its place and its type."""
    items = value.items() if type(value) is dict else enumerate(value) if type(value) in (list, tuple) else ()
    for key, item in items:
        try:
            _pickled(item)
        except _UNSAFE:
            return _first_unsafe(item, f"{name}[{key!r}]" if name else str(key))
    return f"{name}, a {type(value).__module__}.{type(value).__qualname__},"
