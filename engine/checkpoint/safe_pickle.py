"""Values as bytes that torch reads back without running code; anything else is refused when it is written."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch


class BoundedUnpickler(pickle._Unpickler):
    """Takes no more memory than what the pickle holds, whatever numbers a damaged one has.

    In Python: the one in C keeps what a pickle numbers in an array, and allocates that for whatever number is given, up
    to 64 GB. (Of the metadata of 13 billion parameters on 8 ranks it takes a tenth of a second.)
    """

    # A bytearray is allocated in the size that is given, before its bytes are there; nothing of torch's is one.
    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}


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
    refuse_compressed(path)
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file fails in every way there is; each is reported with its cause
        raise ValueError(f"{path} cannot be read: {error}") from error


def refuse_compressed(path: str | os.PathLike[str]) -> None:
    """Raise ValueError, which names the file, for a zip archive that is larger unpacked; torch.load would unpack it."""
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
                f"{path}: {entry.filename} inside is compressed, which torch.save never does; refusing to unpack it"
            )
    if (claimed := sum(entry.file_size for entry in entries)) > (size := os.path.getsize(path)):
        raise ValueError(f"{path} is damaged: its entries take {claimed} bytes, the file has {size}")


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
