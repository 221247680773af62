"""The metadata of torch.distributed.checkpoint (the tensors and where they lie), handled without running code.

torch pickles the metadata, and a pickle from the Hub could run anything, so only the names that it needs are resolved.
Classes of the same names stand in for torch's own, because importing torch.distributed.checkpoint takes longer than
reading the metadata of a large model.
"""

from __future__ import annotations

import copyreg
import functools
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.safe_pickle import BoundedUnpickler

METADATA = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"
MEMORY_FORMAT = "_MEM_FORMAT_ENCODING"  # the one Enum in METADATA
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")  # by value


class Described:
    """Stands in for an object of one of torch's classes.

    Attributes:
        arguments: the arguments of its class (of an Enum member). state: its attributes by name, which are also
            attributes here (None for other names); or another value that its ``__setstate__`` takes.
    """

    kind = ("", "")  # module and name of torch's class
    state: Any = None

    def __init__(self, *arguments: Any, state: Any = None):
        self.arguments, self.state = arguments, state

    def __setstate__(self, state: Any) -> None:
        self.arguments, self.state = (), state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.state.get(name) if isinstance(self.state, dict) else None


@functools.cache
def stand_in(module: str, name: str) -> type[Described]:
    """The class that stands in for torch's class of that name."""
    return type(name, (Described,), {"kind": (module, name)})


def _memory_format(kind: type, name: str) -> Any:
    """Stands in for getattr, with which early versions of Python 3.11 (Debian's 3.11.2) pickle an Enum member; others
    pickle a call with its value."""
    if getattr(kind, "__name__", None) != MEMORY_FORMAT or name not in _MEMORY_FORMATS:
        raise pickle.UnpicklingError(f"it uses {name} of {kind}, which checkpoints of the engine never do")
    return kind(_MEMORY_FORMATS.index(name))


class MetadataUnpickler(BoundedUnpickler):
    """Reads metadata with torch's own classes, and refuses every name that metadata cannot contain."""

    _ALLOWED: Mapping[str, set[str]] = {
        "builtins": {"set", "frozenset", "dict", "list", "tuple"},
        "collections": {"OrderedDict", "defaultdict"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
        "torch": {"Size", "device"},
        "torch.serialization": {"_get_layout"},
        FILES: {"_StorageInfo", "_StoragePrefix"},
    }

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # only Python 3.13 calls it so
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (
            name in self._ALLOWED.get(module, ())
            or (module == METADATA and name.isidentifier() and not name.startswith("__"))
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        ):
            return self.resolve(module, name)
        raise _strange(module, name)

    def resolve(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        # Refuse names that the module imports, such as os.
        if module == METADATA and not (isinstance(found, type) and found.__module__ == METADATA):
            raise _strange(module, name)
        return found


def _strange(module: str, name: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"it names {module}.{name}, which checkpoints of the engine never do")


class _PlainUnpickler(MetadataUnpickler):
    def resolve(self, module: str, name: str) -> Any:
        return stand_in(module, name) if module in (METADATA, FILES) else super().resolve(module, name)


class _Pickler(pickle._Pickler):
    """Writes a Described as torch's object. (The pickler in C would import torch's classes.)"""

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, Described):
            return NotImplemented
        if item.arguments:
            return type(item), item.arguments
        return copyreg.__newobj__, (type(item),), item.state  # type: ignore[attr-defined]

    def save_global(self, item: Any, name: str | None = None) -> None:
        if not isinstance(item, type) or not issubclass(item, Described):
            super().save_global(item, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + "{}\n{}\n".format(*item.kind).encode())  # type: ignore[attr-defined]
        self.memoize(item)  # type: ignore[attr-defined]


def pickled(described: Described) -> bytes:
    """The metadata as bytes that torch unpickles to its own objects."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(described)
    return buffer.getvalue()


def stored_metadata(directory: str | os.PathLike[str], part: str) -> Described:
    """The metadata of the tensors in a part of a checkpoint, such as "model". ValueError if it cannot be read."""
    path = Path(directory) / part / ".metadata"
    try:
        found = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        if type(found) is not stand_in(METADATA, "Metadata") or not isinstance(found.state_dict_metadata, dict):
            raise pickle.UnpicklingError("it is not the metadata of a checkpoint")
    except Exception as error:  # a damaged pickle can fail in any way; report the cause
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found
