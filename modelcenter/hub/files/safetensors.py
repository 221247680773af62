"""The safetensors format: reading and checking headers, planning shards, and the only writer of the project."""

import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from modelcenter.hub.files.git_lfs import refuse_lfs_pointer
from modelcenter.hub.files.json_files import unique_keys, write_json
from modelcenter.hub.files.raw_io import MAX_WRITE
from modelcenter.hub.files.reader import TensorInfo, row_major_strides

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100 * 2**20  # as the safetensors library

Entry = tuple[str, torch.dtype, tuple[int, ...]]  # name, dtype, shape of a tensor to write


# -- reading ---------------------------------------------------------------------------------------------------------


def safetensors_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of a safetensors file, checked against its size.

    Raises:
        ValueError: not a safetensors file, truncated (with the expected and actual sizes), or inconsistent.
    """
    refuse_lfs_pointer(path)
    header, data_start = _read_header(path)
    metadata = header.pop("__metadata__", None) or {}
    spans, tensors = [], {}
    for name, entry in header.items():
        dtype, shape, begin, end = _parse_entry(path, name, entry)
        spans.append((begin, end, name))
        tensors[name] = TensorInfo(path, data_start + begin, dtype, tuple(shape), row_major_strides(shape))
    _check_spans(path, spans, data_start)
    return tensors, metadata


def _invalid(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is not a valid safetensors file: {why}")


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header as JSON, and the byte at which the data starts."""
    actual = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _invalid(path, f"it has {actual} bytes, a header takes at least 8")
        (length,) = struct.unpack("<Q", start)
        if length > _HEADER_LIMIT:
            raise _invalid(path, f"its header claims {length} bytes (the limit is {_HEADER_LIMIT})")
        if 8 + length > actual:
            expected = f"expected at least {8 + length} bytes, the file has {actual}"
            raise _invalid(path, f"it is truncated inside the header: {expected}")
        try:
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise _invalid(path, f"its header does not parse ({error})") from None
    if not isinstance(header, dict):
        raise _invalid(path, "its header is not an object")
    return header, 8 + length


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    """dtype, shape, first byte and end of a tensor, counted from the start of the data."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        plain = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        known = dtype in DTYPES
    except (TypeError, KeyError, ValueError):
        raise _invalid(path, f"the entry of tensor {name!r} is malformed: {str(entry)[:200]}") from None
    if not plain or end < begin:
        raise _invalid(path, f"the entry of tensor {name!r} has impossible numbers: {str(entry)[:200]}")
    if not known:
        raise _invalid(path, f"tensor {name!r} has the dtype {dtype!r}; supported: {', '.join(DTYPES)}")
    if prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise _invalid(
            path, f"tensor {name!r} of shape {shape} and dtype {dtype} does not fill its {end - begin} bytes"
        )
    return DTYPES[dtype], shape, begin, end


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_start: int) -> None:
    """Raise unless the tensors follow one another without gaps and end where the file does."""
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise _invalid(path, f"tensor {name!r} starts at byte {begin} of the data, expected {position}")
        position = end
    expected, actual = data_start + position, path.stat().st_size
    if expected != actual:
        cut = "truncated" if actual < expected else "longer than its header says"
        raise _invalid(path, f"it is {cut}: expected {expected} bytes, the file has {actual}")


# -- writing ---------------------------------------------------------------------------------------------------------


def file_head(entries: Sequence[Entry]) -> tuple[bytes, list[int]]:
    """What a safetensors file of these tensors starts with, and the byte at which each, then the file, ends or starts.

    Returns:
        (length and header, padded to a multiple of 8 bytes; first byte of each tensor, then the size of the file).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places = [0]
    for name, dtype, shape in entries:
        end = places[-1] + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [places[-1], end]}
        places.append(end)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [8 + len(text) + place for place in places]


class SafetensorsWriter:
    """Writes a file of known entries, one tensor at a time, in the order given. A context manager.

    The header comes first, from the shapes alone, padded so that data starts at a multiple of 8 bytes.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]):
        self._start, _ = file_head(entries)
        self._path, self._left = path, list(reversed(entries))

    def __enter__(self) -> "SafetensorsWriter":
        self._file = open(self._path, "wb", buffering=0)
        self._write(memoryview(self._start))
        return self

    def write(self, tensor: torch.Tensor) -> None:
        """Write the next tensor; it has the dtype and shape announced."""
        name, dtype, shape = self._left.pop()
        assert tensor.dtype == dtype and tuple(tensor.shape) == shape, (name, tensor.dtype, tuple(tensor.shape))
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._write(flat.view(torch.uint8).numpy().data)

    def _write(self, data: memoryview) -> None:
        while len(data):
            data = data[self._file.write(data[:MAX_WRITE]) :]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            assert not self._left, f"{len(self._left)} tensors were announced and not written"
            os.fsync(self._file.fileno())
        self._file.close()


@dataclass(frozen=True)
class FilePlan:
    """A file to write and the tensors in it."""

    name: str
    entries: tuple[Entry, ...]


def plan_files(entries: Sequence[Entry], max_bytes: int, stem: str = "model") -> list[FilePlan]:
    """Deal tensors, in their order, to files of at most `max_bytes` each; a larger tensor has a file of its own.

    Within a file wider dtypes come first, which keeps every tensor aligned to its element size.
    """
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = prod(entry[2]) * entry[1].itemsize
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    for group in groups:
        group.sort(key=lambda entry: -entry[1].itemsize)
    if len(groups) == 1:
        return [FilePlan(f"{stem}.safetensors", tuple(groups[0]))]
    count = len(groups)
    return [FilePlan(f"{stem}-{i:05d}-of-{count:05d}.safetensors", tuple(g)) for i, g in enumerate(groups, 1)]


def write_index(directory: Path, plans: Sequence[FilePlan], stem: str = "model") -> None:
    """Write the index of a checkpoint of several files."""
    entries = [entry for plan in plans for entry in plan.entries]
    total = {
        "total_parameters": sum(prod(shape) for _, _, shape in entries),
        "total_size": sum(prod(shape) * dtype.itemsize for _, dtype, shape in entries),
    }
    names = {entry[0]: plan.name for plan in plans for entry in plan.entries}
    write_json(
        directory / f"{stem}.safetensors.index.json", {"metadata": total, "weight_map": dict(sorted(names.items()))}
    )


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(size: int | str) -> int:
    """Bytes of "5GB", "200MB", "1.5GiB" or a number.

    Raises:
        ValueError: not a positive size.
    """
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]I?B)?", str(size).strip().upper())
    try:
        value = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    except (ValueError, KeyError):
        value = 0
    if value <= 0:
        raise ValueError(f"max_shard_size: got {size!r}, expected bytes such as 500000000, '500MB' or '5GB'")
    return value
