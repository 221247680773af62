"""The safetensors format: reading the tensors of a file, planning shards, and the only writer of the project."""

import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from modelcenter.hub.files.json_files import write_json
from modelcenter.hub.files.raw_io import MAX_WRITE
from modelcenter.hub.files.reader import TensorInfo, row_major_strides
from modelcenter.hub.files.safetensors_header import read_header

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

# Name, dtype, shape of a tensor to write. A name with a folder, such as "2_Dense/linear.weight", is a tensor in the
# file of that folder, where its name lacks the folder.
Entry = tuple[str, torch.dtype, tuple[int, ...]]


# -- reading ---------------------------------------------------------------------------------------------------------


def safetensors_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of a safetensors file, checked against its size.

    Raises:
        ValueError: as read_header, or torch does not have the dtype of a tensor.
    """
    entries, metadata = read_header(path)
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name!r} has the dtype {entry.dtype!r}, which is not supported; supported: "
                f"{', '.join(DTYPES)}"
            )
    return {
        name: TensorInfo(path, entry.offset, DTYPES[entry.dtype], entry.shape, row_major_strides(entry.shape))
        for name, entry in entries.items()
    }, metadata


# -- writing ---------------------------------------------------------------------------------------------------------


def file_head(entries: Sequence[Entry]) -> tuple[bytes, list[int]]:
    """The start of a safetensors file with these tensors, and their positions.

    Returns:
        (length and header, padded to a multiple of 8 bytes; first byte of each tensor, then the size of the file).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places = [0]
    for name, dtype, shape in entries:
        end = places[-1] + prod(shape) * dtype.itemsize
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [places[-1], end]}
        header[name.rpartition("/")[2]] = entry
        places.append(end)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [8 + len(text) + place for place in places]


WEIGHTS_FILE = "model.safetensors"


class SafetensorsWriter:
    """Writes a file of known entries, one tensor at a time, in the given order. A context manager.

    The header comes first, computed from the shapes alone, and padded so that data starts at a multiple of 8 bytes.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]):
        self._start, _ = file_head(entries)
        self._path, self._left = path, list(reversed(entries))

    def __enter__(self) -> "SafetensorsWriter":
        self._file = open(self._path, "wb", buffering=0)
        self._write(memoryview(self._start))
        return self

    def write(self, tensor: torch.Tensor) -> None:
        """Write the next tensor, which has the dtype and shape of its entry."""
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


def plan_files(entries: Sequence[Entry], max_bytes: int) -> list[FilePlan]:
    """Distribute tensors, in order, over files of at most `max_bytes` each; a larger tensor has a file of its own.
    Tensors in a folder share one file there.

    Within a file wider dtypes come first, which keeps every tensor aligned to its element size.
    """
    groups: list[list[Entry]] = [[]]
    folders: dict[str, list[Entry]] = {}
    filled = 0
    for entry in entries:
        if folder := entry[0].rpartition("/")[0]:
            folders.setdefault(folder, []).append(entry)
            continue
        size = prod(entry[2]) * entry[1].itemsize
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    for group in (*groups, *folders.values()):
        group.sort(key=lambda entry: -entry[1].itemsize)
    beside = [FilePlan(f"{folder}/{WEIGHTS_FILE}", tuple(group)) for folder, group in folders.items()]
    if len(groups) == 1:
        return [FilePlan(WEIGHTS_FILE, tuple(groups[0])), *beside]
    count = len(groups)
    shards = [FilePlan(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(g)) for i, g in enumerate(groups, 1)]
    return [*shards, *beside]


def write_index(directory: Path, plans: Sequence[FilePlan]) -> None:
    """Write the index of a checkpoint in several files, without those in folders. A single file needs no index."""
    plans = [plan for plan in plans if "/" not in plan.name]
    if len(plans) < 2:
        return
    entries = [entry for plan in plans for entry in plan.entries]
    total = {
        "total_parameters": sum(prod(shape) for _, _, shape in entries),
        "total_size": sum(prod(shape) * dtype.itemsize for _, dtype, shape in entries),
    }
    names = {entry[0]: plan.name for plan in plans for entry in plan.entries}
    index = {"metadata": total, "weight_map": dict(sorted(names.items()))}
    write_json(directory / "model.safetensors.index.json", index)


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(size: int | str) -> int:
    """The number of bytes in "5GB", "200MB", "1.5GiB" or a number.

    Raises:
        ValueError: it is not a positive size.
    """
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]I?B)?", str(size).strip().upper())
    try:
        value = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    except (ValueError, KeyError):
        value = 0
    if value <= 0:
        raise ValueError(f"max_shard_size: got {size!r}, expected bytes such as 500000000, '500MB' or '5GB'")
    return value
