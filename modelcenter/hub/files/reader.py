"""Checkpoint files as tensors that are read by boxes: safetensors and PyTorch's pickles, single or sharded.

A header tells where each tensor lies; elements are then read with positioned reads, straight into their destination
where that is contiguous. Files are not memory-mapped, so nothing but what was asked for is ever resident. Pickles are
opened with `weights_only`, so no code in them runs.
"""

import json
import math
import os
import struct
import threading
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelcenter.convert.pieces import Box, whole
from modelcenter.convert.stream import copy_values
from modelcenter.hub.files.names import WEIGHT_FILES

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
# Megatron's tensor parallelism leaves a file of each rank.
FIRST_PART, PARTS = "mp_rank_00_model_states.pt", "mp_rank_*_model_states.pt"
_HEADER_LIMIT = 100 * 2**20  # as the safetensors library
_LEGACY_LIMIT = 4 * 10**9  # largest pickle without random access that is read whole
_POINTER = b"version https://git-lfs.github.com/spec/"
_GAP = 1024  # bytes; rows with a hole at least this long are read one by one
_BATCH = 8 * 2**20  # bytes of rows that are read at once where their holes are shorter


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` is the byte of its first element in `file`."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class FileSource:
    """The tensors of a checkpoint (convert.stream.Source). `bytes_read` counts what was read of their data.

    Several threads may read at once.

    Args:
        loaded: tensors of files that cannot be read in part.
        absent: name that an index lists and its file does not hold -> the error, for who needs that tensor.
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
        """Whether tensors are in memory, since their file cannot be read in part."""
        return bool(self._loaded)

    def rename(self, names: Mapping[str, str]) -> None:
        """Keep the tensors of these names only, under new ones: {name: new name}."""
        self.tensors = {new: self.tensors[old] for old, new in names.items() if old in self.tensors}
        self.absent = {new: self.absent[old] for old, new in names.items() if old in self.absent}
        self._loaded = {new: self._loaded[old] for old, new in names.items() if old in self._loaded}

    def position(self, name: str) -> tuple[str, int]:
        return str(self.tensors[name].file), self.tensors[name].offset

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def cost(self, name: str, box: Box) -> int:
        """Bytes of the file that reading the box takes."""
        info = self.tensors[name]
        order = None if name in self._loaded else _order(info)
        if order is None:
            return info.dtype.itemsize * math.prod(high - low for low, high in box)
        return _cost(info.dtype.itemsize, [info.shape[d] for d in order], tuple(box[d] for d in order))

    def read(self, name: str, box: Box | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """A box of a tensor (all of it by default) as a contiguous CPU tensor; into `out` if given."""
        info = self.tensors[name]
        box = whole(info.shape) if box is None else box
        sizes = [high - low for low, high in box]
        if out is None:
            out = torch.empty(sizes, dtype=info.dtype)
        if not out.numel():
            return out
        if name in self._loaded:
            part = self._loaded[name][tuple(slice(low, high) for low, high in box)]
            self._count(part.numel() * info.dtype.itemsize)
            out.view(sizes).copy_(part)
        elif (order := _order(info)) is None:
            out.view(sizes).copy_(self._read_strided(info, box, sizes))
        elif order == tuple(range(len(order))):
            self._read_box(info, info.offset, info.shape, box, out.view(sizes))
        else:
            stored = torch.empty([sizes[d] for d in order], dtype=info.dtype)
            self._read_box(info, info.offset, [info.shape[d] for d in order], tuple(box[d] for d in order), stored)
            copy_values(out.view(sizes).permute(order), stored)
        return out

    def _read_box(self, info: TensorInfo, start: int, shape: Sequence[int], box: Box, out: torch.Tensor) -> None:
        """Read a box of the row-major tensor of that shape whose first element lies at byte `start` of the file."""
        item, inner, rest = info.dtype.itemsize, shape[1:], box[1:]
        row = item * math.prod(inner)
        if rest == whole(inner):
            self._pread(info, start + row * (box[0][0] if box else 0), out)
            return
        if _hole(item, inner, rest) >= _GAP:
            if rest[1:] == whole(inner[1:]) and out.is_contiguous():
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
        """Read pieces of one length that begin every `step` bytes into the rows of `out`, contiguous."""
        target = as_bytes(out)
        size, handle, read = len(target) // len(out), self._handle(info.file), os.preadv
        for index in range(len(out)):
            row, at = target[index * size : (index + 1) * size], start + index * step
            if read(handle, [row], at) != size:
                _read_all(info.file, handle, row, at)
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
        _read_all(info.file, self._handle(info.file), target, start)
        self._count(len(target))


def _read_all(file: Path, handle: int, target: memoryview, start: int) -> None:
    """Fill `target` from byte `start` on: one call may give less, as of files over a network."""
    done = 0
    while done < len(target):
        count = os.preadv(handle, [target[done:]], start + done)
        if count == 0:
            raise ValueError(f"{file} ended at byte {start + done} while {len(target) - done} more were needed")
        done += count


def reading_threads() -> int:
    """How many threads read a model: as many as torch computes with, as far as that makes it faster."""
    return min(torch.get_num_threads(), 8)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous CPU tensor. (One of a single element is contiguous whatever its strides say.)"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return flat_bytes(tensor).numpy().data


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _order(info: TensorInfo) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor lies row by row (of a transposed one not their own), if there is one.

    Checkpoints that were made from TensorFlow's or JAX's files hold transposed tensors.
    """
    order = sorted(range(len(info.shape)), key=lambda d: -info.strides[d])
    dense = _row_major([info.shape[d] for d in order])
    fits = all(info.strides[d] == step for d, step in zip(order, dense, strict=True) if info.shape[d] > 1)
    return tuple(order) if fits else None


def _hole(item: int, shape: Sequence[int], box: Box) -> int:
    """Bytes of a tensor outside the span from the first to the last element of the box."""
    last = sum((high - 1 - low) * step for (low, high), step in zip(box, _row_major(shape), strict=True))
    return item * (math.prod(shape) - 1 - last)


def _cost(item: int, shape: Sequence[int], box: Box) -> int:
    """Bytes that `FileSource._read_box` reads."""
    if not box:
        return item
    (low, high), inner, rest = box[0], shape[1:], box[1:]
    if rest != whole(inner) and _hole(item, inner, rest) >= _GAP:
        return (high - low) * _cost(item, inner, rest)
    return (high - low) * item * math.prod(inner)


def refuse_quantised(dtypes: Iterable[tuple[str, torch.dtype]]) -> None:
    """Raise ValueError for (name, dtype) of a tensor whose numbers mean nothing without a scale."""
    for name, dtype in dtypes:
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(
                f"tensor {name!r} has the dtype {dtype}; quantised and integer weights are not supported, load a "
                "float16, bfloat16 or float32 checkpoint"
            )


def refuse_pointer(path: Path) -> None:
    """Raise ValueError for what Git leaves in place of a large file where Git LFS is not installed."""
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, not the file itself: run `git lfs install` and `git lfs pull` in "
                f"{path.parent}, or get the model with `modelcenter download`"
            )


# -- safetensors -----------------------------------------------------------------------------------------------------


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} occurs twice")
    return names


def safetensors_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of a safetensors file, checked against its size.

    Raises:
        ValueError: not a safetensors file, truncated (with the expected and actual sizes), or inconsistent.
    """

    def wrong(why: str) -> ValueError:
        return ValueError(f"{path} is not a valid safetensors file: {why}")

    refuse_pointer(path)
    actual = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise wrong(f"it has {actual} bytes, a header takes at least 8")
        (length,) = struct.unpack("<Q", start)
        if length > _HEADER_LIMIT:
            raise wrong(f"its header claims {length} bytes (the limit is {_HEADER_LIMIT})")
        if 8 + length > actual:
            raise wrong(
                f"it is truncated inside the header: expected at least {8 + length} bytes, the file has {actual}"
            )
        try:
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise wrong(f"its header does not parse ({error})") from None
    if not isinstance(header, dict):
        raise wrong("its header is not an object")
    metadata = header.pop("__metadata__", None) or {}
    base, spans, tensors = 8 + length, [], {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            plain = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            known = dtype in DTYPES
        except (TypeError, KeyError, ValueError):
            raise wrong(f"the entry of tensor {name!r} is malformed: {str(entry)[:200]}") from None
        if not plain or end < begin:
            raise wrong(f"the entry of tensor {name!r} has impossible numbers: {str(entry)[:200]}")
        if not known:
            raise wrong(f"tensor {name!r} has the dtype {dtype!r}; supported: {', '.join(DTYPES)}")
        if math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
            raise wrong(f"tensor {name!r} of shape {shape} and dtype {dtype} does not fill its {end - begin} bytes")
        spans.append((begin, end, name))
        tensors[name] = TensorInfo(path, base + begin, DTYPES[dtype], tuple(shape), _row_major(shape))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise wrong(f"tensor {name!r} starts at byte {begin} of the data, expected {position}")
        position = end
    if base + position != actual:
        cut = "truncated" if actual < base + position else "longer than its header says"
        raise wrong(f"it is {cut}: expected {base + position} bytes, the file has {actual}")
    return tensors, metadata


# -- PyTorch pickles -------------------------------------------------------------------------------------------------


def _state_dict(loaded: Any, path: Path) -> dict[str, torch.Tensor]:
    for wrapper in ("state_dict", "module"):  # a trainer's; DeepSpeed's
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict) or not all(isinstance(k, str) for k in loaded):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected a dictionary of tensors by name")
    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    others = [name for name in loaded if name not in tensors]
    if others or not tensors:
        raise ValueError(f"{path}: expected a dictionary of tensors by name, but {others[:3] or 'it'} holds none")
    return tensors


def _torch_load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a bad file; each is reported with its cause
        raise ValueError(
            f"{path} cannot be read as weights: {str(error).splitlines()[0] if str(error) else type(error).__name__}. "
            "Only tensors are read from a pickle, nothing in it is executed; a file that holds other objects, or is "
            "damaged, must be converted to safetensors by someone who trusts it"
        ) from error


def pickle_tensors(path: Path) -> tuple[dict[str, TensorInfo], dict[str, torch.Tensor]]:
    """The tensors of a `.bin` file: located, if it is a zip archive, else loaded whole.

    Raises:
        ValueError: not a file of tensors, damaged, or too large to be loaded whole.
    """
    refuse_pointer(path)
    if not zipfile.is_zipfile(path):
        size = path.stat().st_size
        with open(path, "rb") as file:
            if file.read(4) == b"PK\x03\x04":
                raise ValueError(f"{path} is truncated: a zip archive without its end (it has {size} bytes)")
        if size > _LEGACY_LIMIT:
            raise ValueError(
                f"{path} is a pickle of PyTorch before 1.6, which can only be loaded whole ({size} bytes). Convert it "
                "once on a large machine: torch.save(torch.load(path, weights_only=True), path)"
            )
        loaded = _state_dict(_torch_load(path), path)
        return {n: TensorInfo(path, 0, t.dtype, tuple(t.shape), tuple(t.stride())) for n, t in loaded.items()}, loaded
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from error
    if packed:
        raise ValueError(
            f"{path}: {packed[0]} inside is compressed, which torch.save never does; refusing to unpack it"
        )
    from torch._subclasses.fake_tensor import FakeTensorMode  # half a second to import, needed here only

    with FakeTensorMode():  # tensors without data, whose storages know where in the file they lie
        fakes = _state_dict(_torch_load(path), path)
    tensors, size = {}, path.stat().st_size
    for name, fake in fakes.items():
        item = fake.dtype.itemsize
        storage = fake.untyped_storage()._checkpoint_offset
        if storage is None:
            raise ValueError(f"{path}: tensor {name!r} has no data of its own in the file")
        begin = storage + int(fake.storage_offset()) * item
        end = begin + item * (1 + sum((n - 1) * s for n, s in zip(fake.shape, fake.stride(), strict=True)))
        if end > size and fake.numel():
            raise ValueError(f"{path} is truncated: tensor {name!r} ends at byte {end}, the file has {size}")
        tensors[name] = TensorInfo(path, begin, fake.dtype, tuple(fake.shape), tuple(fake.stride()))
    return tensors, {}


# -- checkpoints of one or many files --------------------------------------------------------------------------------


def index_files(path: Path) -> dict[str, str]:
    """The weight map of an index: tensor -> name of the file beside it that holds it.

    Raises:
        ValueError: not an index, or an entry that is not a plain file name (it could leave the directory).
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)["weight_map"]
        pairs = list(entries.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of weight files: {error!r}") from None
    for name, file in pairs:
        if not isinstance(file, str) or not file or file in (".", "..") or any(c in file for c in "/\\\0:"):
            raise ValueError(f"{path}: the entry of tensor {name!r} is {file!r}, expected the name of a file beside it")
    return entries


def find_weights(directory: Path) -> Path:
    """The weight file, or the index of weight files, of a Hugging Face directory.

    Raises:
        ValueError: the directory holds none that can be read; lists what it holds.
    """
    for name in WEIGHT_FILES:
        for candidate in (directory / name, directory / f"{name}.index.json"):
            if candidate.is_file():
                return candidate
    if (directory / FIRST_PART).is_file():
        return directory / FIRST_PART
    held = ", ".join(sorted(p.name for p in directory.iterdir())[:20]) or "nothing"
    raise ValueError(
        f"no weights in {directory}: expected {' or '.join(WEIGHT_FILES)}, or an index of shards "
        f"(<name>.index.json). It holds: {held}"
    )


def open_checkpoint(weights: Path) -> FileSource:
    """Open a weight file, or the files an index lists (find_weights), and check them; reads headers only.

    Raises:
        ValueError: a file is missing, truncated or malformed; two hold a tensor that the index does not list.
    """
    if weights.name == FIRST_PART:
        return _open_parts(sorted(weights.parent.glob(PARTS)))
    if weights.suffix != ".json":
        found, loaded = _open_files([weights])
        return FileSource(found[weights], loaded)
    entries = index_files(weights)
    files = [weights.parent / name for name in sorted(set(entries.values()))]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise ValueError(f"{weights} lists {len(files)} files, of which {len(absent)} are missing: {', '.join(absent)}")
    found, loaded = _open_files(files)
    tensors, lacking = {}, {}
    for name, file in entries.items():
        held = found[weights.parent / file]
        if name in held:
            tensors[name] = held[name]
        else:  # the Hub's own converter copied indices, and left repetitions of tied tensors out of the shards
            lacking[name] = f"{weights} says that {file} holds tensor {name!r}, but it does not"
    for path, held in found.items():  # transformers reads the names of files in an index, and all tensors of these
        for name in sorted(held.keys() - entries.keys()):
            if name in tensors:
                raise ValueError(
                    f"{weights} does not list tensor {name!r}, which {tensors[name].file.name} and {path.name} hold; "
                    "add it with the file to read it from"
                )
            tensors[name] = held[name]
    return FileSource(tensors, loaded, lacking)


def _open_parts(files: Sequence[Path]) -> FileSource:
    """Files of ranks, with the rank before each name: "2:word_embeds.weight" (convert.megatron puts them together)."""
    tensors: dict[str, TensorInfo] = {}
    loaded: dict[str, torch.Tensor] = {}
    for path in files:
        rank = int(path.name.split("_")[2])
        found, whole_tensors = pickle_tensors(path)
        tensors |= {f"{rank}:{name}": info for name, info in found.items()}
        loaded |= {f"{rank}:{name}": tensor for name, tensor in whole_tensors.items()}
    return FileSource(tensors, loaded)


def _open_files(files: Iterable[Path]) -> tuple[dict[Path, dict[str, TensorInfo]], dict[str, torch.Tensor]]:
    found, loaded = {}, {}
    for path in files:
        if path.suffix == ".safetensors":
            found[path] = safetensors_header(path)[0]
        else:
            found[path], whole_tensors = pickle_tensors(path)
            loaded.update(whole_tensors)
    return found, loaded
