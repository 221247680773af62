"""Reading boxes of tensors from files.

A header gives the position of each tensor. Elements are then read with positioned reads, directly into their
destination if it is contiguous. Files are not memory-mapped, so only what was requested is ever resident.
"""

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modelcenter.convert.pieces import Box, full_box
from modelcenter.convert.stream import copy_values
from modelcenter.hub.files.raw_io import as_bytes, read_at

_GAP = 1024  # bytes; rows with gaps of at least this size are read one by one
_BATCH = 8 * 2**20  # bytes of rows that are read at once if their gaps are smaller


@dataclass(frozen=True)
class TensorInfo:
    """The position of a tensor: `offset` is the byte of its first element in `file`."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class FileSource:
    """The tensors of a checkpoint (convert.stream.Source). `bytes_read` counts the bytes read of their data.

    Several threads may read at once.

    Args:
        loaded: tensors of files that cannot be read in part.
        absent: name that an index lists but its file lacks -> the error, raised if that tensor is needed.
    """

    def __init__(
        self,
        tensors: dict[str, TensorInfo],
        loaded: dict[str, torch.Tensor] | None = None,
        absent: dict[str, str] | None = None,
    ):
        self.tensors = tensors
        self.absent = absent or {}
        self._read = 0
        self._loaded = loaded or {}
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "FileSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    @property
    def bytes_read(self) -> int:
        return self._read

    @property
    def is_loaded(self) -> bool:
        """Whether tensors are in memory because their file cannot be read in part."""
        return bool(self._loaded)

    def copy(self) -> "FileSource":
        """A source of the same tensors, which can be renamed independently of this one."""
        return FileSource(dict(self.tensors), dict(self._loaded), dict(self.absent))

    def add(self, tensors: Mapping[str, TensorInfo], loaded: Mapping[str, torch.Tensor]) -> None:
        """Add tensors of further files; arguments as in the constructor."""
        self.tensors = {**self.tensors, **tensors}
        self._loaded = {**self._loaded, **loaded}

    def hold(self, name: str, values: torch.Tensor, of: str) -> None:
        """Add a tensor that was computed from the tensor `of`, and give it the position of that in the files."""
        info, shape = self.tensors[of], tuple(values.shape)
        place = TensorInfo(info.file, info.offset, values.dtype, shape, row_major_strides(shape))
        self.add({name: place}, {name: values})

    def rename(self, names: Mapping[str, str]) -> None:
        """Keep only the tensors with these names, under new ones: {name: new name}."""
        self.tensors = {new: self.tensors[old] for old, new in names.items() if old in self.tensors}
        self.absent = {new: self.absent[old] for old, new in names.items() if old in self.absent}
        self._loaded = {new: self._loaded[old] for old, new in names.items() if old in self._loaded}

    def position(self, name: str) -> tuple[str, int]:
        return str(self.tensors[name].file), self.tensors[name].offset

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def cost(self, name: str, box: Box) -> int:
        """Bytes that reading the box reads from the file."""
        info = self.tensors[name]
        order = None if name in self._loaded else _dimension_order(info)
        if order is None:
            return info.dtype.itemsize * math.prod(high - low for low, high in box)
        return _cost(info.dtype.itemsize, [info.shape[d] for d in order], tuple(box[d] for d in order))

    def read(self, name: str, box: Box | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a tensor (by default all of it) as a contiguous CPU tensor; into `out` if given."""
        info = self.tensors[name]
        box = full_box(info.shape) if box is None else box
        sizes = [high - low for low, high in box]
        if out is None:
            out = torch.empty(sizes, dtype=info.dtype)
        if not out.numel():
            return out
        if name in self._loaded:
            part = self._loaded[name][tuple(slice(low, high) for low, high in box)]
            self._count(part.numel() * info.dtype.itemsize)
            out.view(sizes).copy_(part)
        elif (order := _dimension_order(info)) is None:
            out.view(sizes).copy_(self._read_strided(info, box, sizes))
        elif order == tuple(range(len(order))):
            self._read_box(info, info.offset, info.shape, box, out.view(sizes))
        else:
            stored = torch.empty([sizes[d] for d in order], dtype=info.dtype)
            self._read_box(info, info.offset, [info.shape[d] for d in order], tuple(box[d] for d in order), stored)
            copy_values(out.view(sizes).permute(order), stored)
        return out

    def _read_box(self, info: TensorInfo, start: int, shape: Sequence[int], box: Box, out: torch.Tensor) -> None:
        """Read a box of the row-major tensor with this shape whose first element is at byte `start` of the file."""
        item, inner, rest = info.dtype.itemsize, shape[1:], box[1:]
        row = item * math.prod(inner)
        if rest == full_box(inner):
            self._pread(info, start + row * (box[0][0] if box else 0), out)
            return
        if _hole_bytes(item, inner, rest) >= _GAP:
            if rest[1:] == full_box(inner[1:]) and out.is_contiguous():
                self._read_rows(info, start + row * box[0][0] + row // inner[0] * rest[0][0], row, out)
                return
            for index in range(*box[0]):
                self._read_box(info, start + index * row, inner, rest, out[index - box[0][0]])
            return
        columns = tuple(slice(low, high) for low, high in rest)
        batch = max(1, _BATCH // row)
        for low in range(*box[0], batch):
            high = min(low + batch, box[0][1])
            rows = torch.empty((high - low, *inner), dtype=info.dtype)
            self._pread(info, start + low * row, rows)
            out[low - box[0][0] : high - box[0][0]] = rows[(slice(None), *columns)]

    def _read_rows(self, info: TensorInfo, start: int, step: int, out: torch.Tensor) -> None:
        """Read pieces of equal length that begin every `step` bytes into the rows of `out`, which is contiguous."""
        target = as_bytes(out)
        size, handle, read = len(target) // len(out), self._handle(info.file), os.preadv
        for index in range(len(out)):
            row, at = target[index * size : (index + 1) * size], start + index * step
            if read(handle, [row], at) != size:
                read_at(info.file, handle, row, at)
        self._count(len(target))

    def _read_strided(self, info: TensorInfo, box: Box, sizes: list[int]) -> torch.Tensor:
        """Read a box of a tensor whose elements overlap or leave gaps: the span it occupies, then a view of that."""
        first = sum(low * s for (low, _), s in zip(box, info.strides, strict=True))
        span = 1 + sum((n - 1) * s for n, s in zip(sizes, info.strides, strict=True))
        flat = torch.empty(span, dtype=info.dtype)
        self._pread(info, info.offset + first * info.dtype.itemsize, flat)
        return flat.as_strided(sizes, info.strides)

    def _handle(self, file: Path) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(file, os.O_RDONLY)
            return self._open[file]

    def _count(self, size: int) -> None:
        with self._lock:
            self._read += size

    def _pread(self, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        target = as_bytes(out)
        read_at(info.file, self._handle(info.file), target, start)
        self._count(len(target))


def reading_threads() -> int:
    """The number of threads that read a model: as many as torch computes with, up to where more are not faster."""
    return min(torch.get_num_threads(), 8)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _dimension_order(info: TensorInfo) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is stored row by row (if transposed, not their own), if there is one.

    Checkpoints converted from TensorFlow's or JAX's files hold transposed tensors.
    """
    order = sorted(range(len(info.shape)), key=lambda d: -info.strides[d])
    dense = row_major_strides([info.shape[d] for d in order])
    fits = all(info.strides[d] == step for d, step in zip(order, dense, strict=True) if info.shape[d] > 1)
    return tuple(order) if fits else None


def _hole_bytes(item: int, shape: Sequence[int], box: Box) -> int:
    """Bytes of a tensor outside the span from the first to the last element of the box."""
    last = sum((high - 1 - low) * step for (low, high), step in zip(box, row_major_strides(shape), strict=True))
    return item * (math.prod(shape) - 1 - last)


def _cost(item: int, shape: Sequence[int], box: Box) -> int:
    """Bytes that `FileSource._read_box` reads."""
    if not box:
        return item
    (low, high), inner, rest = box[0], shape[1:], box[1:]
    if rest != full_box(inner) and _hole_bytes(item, inner, rest) >= _GAP:
        return (high - low) * _cost(item, inner, rest)
    return (high - low) * item * math.prod(inner)
