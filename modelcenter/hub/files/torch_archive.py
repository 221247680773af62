"""Tensors inside the files of a distributed checkpoint: each is written by `torch.save`, as a zip archive of its own.

`locate_tensor` finds the position of the elements, so that any part of them can be read while only a description is
unpickled. `archive_frame` returns the bytes before and after the elements of a tensor to write, from its dtype and
shape alone, so that elements can be streamed in between.
"""

import functools
import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.safe_pickle import BoundedUnpickler
from modelcenter.hub.files.reader import TensorInfo

_PICKLE_LIMIT = 2**20  # a description has about 200 bytes
_ALIGNMENT = 64
_DATA = "archive/data/0"
_ENTRIES = 4  # in an archive: the elements, and three that describe them
# dtype -> the name of its storage class, by which descriptions give the older dtypes.
_STORAGE_CLASSES = {t: n for t, n in torch.storage._dtype_to_storage_type_map().items() if not n.startswith("Q")}
_DTYPE_OF_CLASS = {name: dtype for dtype, name in _STORAGE_CLASSES.items()}


class _FileSlice(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: Any, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _TensorUnpickler(BoundedUnpickler):
    """Reads torch.save's description of one tensor; calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return lambda *arguments: arguments
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch", "Size"):
            return torch.Size
        found = getattr(torch, name, None) if module in ("torch", "torch.storage") else None
        if name == "UntypedStorage" or isinstance(found, torch.dtype):
            return found or name
        if module == "torch" and name in _DTYPE_OF_CLASS:
            return _DTYPE_OF_CLASS[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(key, str) or not isinstance(count, int):
            raise pickle.UnpicklingError("it refers to an object other than a tensor storage")
        return storage, key, count


def locate_tensor(path: Path, file: Any, start: int, length: int) -> TensorInfo:
    """Find the elements of the tensor that `torch.save` wrote to these bytes of an open file.

    Raises:
        ValueError: they are not such a tensor, or are damaged.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_FileSlice(file, start, length))) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            text = entries["data.pkl"]
            if text.file_size > _PICKLE_LIMIT or any(e.compress_type != zipfile.ZIP_STORED for e in entries.values()):
                raise ValueError("it is compressed, or holds more than a tensor")
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise ValueError("its numbers are big-endian")
            description = _TensorUnpickler(io.BytesIO(archive.read(text))).load()
            (storage, key, count), first, shape, strides, *rest = description
            dtype = storage if isinstance(storage, torch.dtype) else rest[2]
            shape, strides = tuple(shape), tuple(strides)
            numbers = (first, count, *shape, *strides)
            if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError("it does not describe a tensor")
            data = entries[f"data/{key}"]
            needed = first + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            if math.prod(shape) and needed * dtype.itemsize > data.file_size:
                raise ValueError(f"it describes {needed} elements but holds {data.file_size // dtype.itemsize}")
            file.seek(start + data.header_offset)
            head = file.read(30)
            begin = data.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
            if begin + data.file_size > length:
                raise ValueError("it is truncated")
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, ValueError, TypeError, IndexError, EOFError) as error:
        raise ValueError(f"{path}: the tensor at byte {start} is damaged: {error}") from error
    except (AttributeError, struct.error, NotImplementedError, RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the tensor at byte {start} is damaged: {error!r}") from error
    return TensorInfo(path, start + begin + first * dtype.itemsize, dtype, shape, strides)


# -- writing ---------------------------------------------------------------------------------------------------------


class _StorageReference:
    """Represents the elements in the description."""


class _TensorPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, kind: Any, count: int):
        super().__init__(buffer, protocol=2)
        self._kind, self._count = kind, count

    def persistent_id(self, item: Any) -> Any:
        return ("storage", self._kind, "0", "cpu", self._count) if isinstance(item, _StorageReference) else None


class _RebuiltTensor:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]):
        self._state = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._state


def _pickle_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The description of a row-major tensor, as torch.save writes it."""
    count = math.prod(shape)
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    arguments: tuple[Any, ...] = (_StorageReference(), 0, shape, tuple(strides), False, OrderedDict())
    typed = _STORAGE_CLASSES.get(dtype)
    buffer = io.BytesIO()
    if typed is not None:
        kind = getattr(torch, typed)
        _TensorPickler(buffer, kind, count).dump(_RebuiltTensor(torch._utils._rebuild_tensor_v2, arguments))
    else:
        function, size = torch._utils._rebuild_tensor_v3, count * dtype.itemsize
        _TensorPickler(buffer, torch.UntypedStorage, size).dump(_RebuiltTensor(function, (*arguments, dtype)))
    return buffer.getvalue()


def _local_header(name: str, crc: int, size: int, at: int) -> bytes:
    """The header before a stored entry of a zip archive. As in torch.save, the CRC-32 of the elements is not in their
    header but follows them, so that nothing before the elements depends on their values."""
    large, late = size >= 2**32 - 1, name == _DATA
    extra = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
    fill = -(at + 30 + len(name) + len(extra) + 4) % _ALIGNMENT if late else 0
    extra += struct.pack("<HH", 0x4246, fill) + bytes(fill)
    shown = 0xFFFFFFFF if large else size
    sizes = (0, 0, 0) if late and not large else (0, shown, shown) if late else (crc, size, size)
    version, flags = (45, 8 * late) if large else (20, 8 * late)
    head = struct.pack("<HHHHHIIIHH", version, flags, 0, 0, 0x21, *sizes, len(name), len(extra))
    return b"PK\3\4" + head + name.encode() + extra


def _central_header(name: str, crc: int, size: int, at: int) -> bytes:
    """The entry in the directory at the end of a zip archive."""
    large = size >= 2**32 - 1 or at >= 2**32 - 1
    extra = struct.pack("<HHQQQ", 1, 24, size, size, at) if large else b""
    shown, place = (0xFFFFFFFF, 0xFFFFFFFF) if large else (size, at)
    flags = 8 * (name == _DATA)
    head = struct.pack(
        "<HHHHHHIIIHH", 45, 45 if large else 20, flags, 0, 0, 0x21, crc, shown, shown, len(name), len(extra)
    )
    return b"PK\1\2" + head + struct.pack("<HHHII", 0, 0, 0, 0, place) + name.encode() + extra


@functools.lru_cache(1024)  # a model has many tensors of few shapes
def _archive_start(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, int, bytes]:
    """(the bytes before the elements, the start of their entry, the directory entries of what precedes it)."""
    before, directory = b"", b""
    small = {
        "archive/data.pkl": _pickle_tensor(dtype, shape),
        "archive/byteorder": b"little",
        "archive/version": b"3\n",
    }
    for name, content in small.items():
        check = zlib.crc32(content)
        directory += _central_header(name, check, len(content), len(before))
        before += _local_header(name, check, len(content), len(before)) + content
    return before + _local_header(_DATA, 0, math.prod(shape) * dtype.itemsize, len(before)), len(before), directory


def archive_frame(dtype: torch.dtype, shape: tuple[int, ...], crc: int = 0) -> tuple[bytes, bytes]:
    """The bytes before and after the elements of a row-major tensor, whose CRC-32 is `crc`.

    The CRC-32 changes neither the bytes before the elements nor any length.
    """
    size, (before, entries, directory) = math.prod(shape) * dtype.itemsize, _archive_start(dtype, shape)
    directory += _central_header(_DATA, crc, size, entries)
    after = b"PK\7\x08" + struct.pack("<IQQ" if size >= 2**32 - 1 else "<III", crc, size, size)
    at, count = len(before) + size + len(after), _ENTRIES
    after += directory
    if at >= 2**32 - 1:
        after += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(directory), at)
        after += struct.pack("<IIQI", 0x07064B50, 0, at + len(directory), 1)
    return before, after + struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), min(at, 2**32 - 1), 0
    )
