"""Pickled values that torch loads without running code; other values are refused when they are saved."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_UNSAFE = (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError)
_MOST_VALUES = 10_000  # in a tuple, including the tuples inside
_MAKE_TUPLES = (
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.REDUCE, pickle.NEWOBJ,
    pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ,
)  # fmt: skip


class BoundedUnpickler(pickle._Unpickler):
    """Uses no more memory than the values of the pickle take, whatever numbers a damaged one has, and refuses large
    tuples.

    It is written in Python, because the unpickler in C keeps memoised values in an array, which it allocates for any
    index it is given, up to 64 GB. (The metadata of 640 matrices in 8 shards each takes a third of a second.)

    A tuple that is a key is hashed recursively each time it occurs: with (a, a), where a is (b, b), and so on, this
    takes years, and deeply nested tuples overflow the stack.
    """

    def load(self) -> Any:
        self._tuples: dict[int, tuple[Any, ...]] = {}  # {id: (number of values, tuple)}
        return super().load()

    def _count(self) -> None:
        value = self.stack[-1]  # type: ignore[attr-defined]
        if not isinstance(value, tuple):
            return
        count = 1 + sum(self._tuples.get(id(part), (1,))[0] for part in value if isinstance(part, tuple)) + len(value)
        if count > _MOST_VALUES:
            raise pickle.UnpicklingError(f"it holds a tuple of more than {_MOST_VALUES} values")
        self._tuples[id(value)] = count, value


def _counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def load_and_count(unpickler: Any) -> None:
        load(unpickler)
        unpickler._count()

    return load_and_count


BoundedUnpickler.dispatch = {
    code: _counted(load) if code in {name[0] for name in _MAKE_TUPLES} else load
    for code, load in pickle._Unpickler.dispatch.items()
    if code != pickle.BYTEARRAY8[0]  # allocates the given size before its bytes are read
}


def dump(value: Any) -> bytes:
    """``value`` as bytes for ``load``. Raises ValueError, which names the place of a value that cannot be loaded."""
    try:
        return _pickled(value)
    except _UNSAFE as error:
        raise ValueError(
            f"{_first_unsafe(value)} cannot be read back safely: give numbers, strings, tensors, lists, tuples and "
            "dicts of Python and torch"
        ) from error


def load(path: Path) -> Any:
    """The value in a file of ``dump``, with tensors on the CPU. Raises ValueError, which names the file."""
    refuse_compressed(path)
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file can fail in any way; report the cause
        raise ValueError(f"{path} cannot be read: {error}") from error


def refuse_compressed(path: str | os.PathLike[str]) -> None:
    """Raise ValueError, which names the file, for a zip archive that torch.load would unpack to more than its size."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from error
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"{path}: its entry {entry.filename} is compressed, which torch.save never does; refusing to unpack it"
            )
    if (claimed := sum(entry.file_size for entry in entries)) > (size := os.path.getsize(path)):
        raise ValueError(f"{path} is damaged: its entries take {claimed} bytes, but the file has {size}")


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    torch.load(io.BytesIO(file.getvalue()), weights_only=True, map_location="cpu")
    return file.getvalue()


def _first_unsafe(value: Any, name: str = "") -> str:
    """The place and type of the first value inside ``value`` that cannot be loaded safely."""
    items = value.items() if type(value) is dict else enumerate(value) if type(value) in (list, tuple) else ()
    for key, item in items:
        try:
            _pickled(item)
        except _UNSAFE:
            return _first_unsafe(item, f"{name}[{key!r}]" if name else str(key))
    return f"{name}, a {type(value).__module__}.{type(value).__qualname__},"
