"""The tensors of a distributed checkpoint, read by boxes: each part of a tensor directly from its place in a file."""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import check_manifest
from engine.checkpoint.dcp_metadata import FILES, MEMORY_FORMAT, METADATA, Described, pickled, stand_in, stored_metadata
from modelcenter.convert.pieces import Box, box_numel, full_box
from modelcenter.hub.files.adapter_files import refuse_adapter_tensors
from modelcenter.hub.files.reader import FileSource
from modelcenter.hub.files.torch_archive import locate_tensor

MODEL_FOLDER = "model"  # where engine.checkpoint puts the parameters


@dataclass(frozen=True)
class DCPTensorInfo:
    """A tensor: its shape and dtype, and (box, file, first byte, length) of its stored parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Box, str, int, int], ...]


class DCPSource:
    """The model in a distributed checkpoint, saved on any mesh (convert.stream.Source)."""

    def __init__(self, directory: Path):
        """Read the descriptions, but no tensor. Raises ValueError if one is damaged, or parts do not cover a tensor."""
        self._root = (directory / MODEL_FOLDER).resolve()
        self.tensors = _read_infos(stored_metadata(directory, MODEL_FOLDER), directory / MODEL_FOLDER)
        self._located: dict[str, list[tuple[Box, str]]] = {}
        self._parts = FileSource({})

    def __enter__(self) -> "DCPSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._parts.close()

    @property
    def bytes_read(self) -> int:
        return self._parts.bytes_read

    def position(self, name: str) -> tuple[str, int]:
        _, file, start, _ = self.tensors[name].parts[0] if self.tensors[name].parts else ((), "", 0, 0)
        return file, start

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def cost(self, name: str, box: Box) -> int:
        found = ((part, _overlap(own, box)) for own, part in self._locate(name))
        return sum(self._parts.cost(part, inside) for part, inside in found if inside is not None)

    def read(self, name: str, box: Box | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a tensor (by default all of it) as a contiguous CPU tensor; into `out` if given."""
        info = self.tensors[name]
        box = full_box(info.shape) if box is None else box
        sizes = [high - low for low, high in box]
        if out is None:
            out = torch.empty(sizes, dtype=info.dtype)
        if not out.numel():
            return out
        target = out.view(sizes)
        for own, part in self._locate(name):
            inside = _overlap(own, box)
            if inside is None:
                continue
            into = tuple(
                slice(a + o - start, b + o - start) for (a, b), (o, _), (start, _) in zip(inside, own, box, strict=True)
            )
            place = target[into]
            if place.is_contiguous():
                self._parts.read(part, inside, place)
            else:
                place.copy_(self._parts.read(part, inside))
        return out

    def _locate(self, name: str) -> list[tuple[Box, str]]:
        """(box in the tensor, name of the part in `self._parts`) of each part; the parts are located on first use."""
        if name not in self._located:
            info, found = self.tensors[name], []
            for number, (box, file, start, length) in enumerate(info.parts):
                key, path = f"{name}/{number}", self._root / file
                with open(path, "rb") as stream:
                    part = locate_tensor(path, stream, start, length)
                shape = tuple(high - low for low, high in box)
                if part.shape != shape or part.dtype != info.dtype:
                    raise ValueError(
                        f"{path}: part {number} of tensor {name!r} has shape {part.shape} and dtype {part.dtype}, "
                        f"but its metadata says {shape} and {info.dtype}"
                    )
                self._parts.tensors[key] = part
                found.append((box, key))
            self._located[name] = found
        return self._located[name]


def open_model(directory: Path) -> DCPSource:
    """Open the model in a distributed checkpoint.

    Raises:
        ValueError: the checkpoint is incomplete or damaged, or belongs to a model with an adapter.
    """
    check_manifest(directory)
    source = DCPSource(directory)
    refuse_adapter_tensors(source.tensors, directory)
    return source


def _overlap(own: Box, box: Box) -> Box | None:
    """The overlap of `box` of a tensor with the part that is its box `own`, relative to the start of that part."""
    inside = tuple((max(a, c) - a, min(b, d) - a) for (a, b), (c, d) in zip(own, box, strict=True))
    return inside if all(low < high for low, high in inside) else None


def _read_infos(metadata: Any, where: Path) -> dict[str, DCPTensorInfo]:
    infos = {}
    storage = metadata.storage_data if isinstance(metadata.storage_data, dict) else {}
    try:
        places = {(index.fqn, tuple(index.offset)): info for index, info in storage.items() if index.offset is not None}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{where}/.metadata does not locate the tensors: {error}") from error
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, stand_in(METADATA, "TensorStorageMetadata")):
            continue
        try:
            infos[name] = _read_info(name, entry, places)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{where}/.metadata: the entry of tensor {name!r} is malformed: {error}") from error
    return infos


def _read_info(name: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> DCPTensorInfo:
    shape, dtype, parts = tuple(entry.size), entry.properties.state[0], []
    for chunk in entry.chunks:
        place = places[name, tuple(chunk.offsets)]
        box = tuple((o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        parts.append((box, _plain_name(place.relative_path), int(place.offset), int(place.length)))
    boxes = [box for box, *_ in parts]
    inside = all(0 <= a <= b <= n for box in boxes for (a, b), n in zip(box, shape, strict=True))
    if not inside or not _are_disjoint(boxes) or sum(box_numel(box) for box in boxes) != prod(shape):
        raise ValueError(f"its parts do not cover its shape {shape} exactly once")
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has the name {name!r} and the dtype {dtype!r}")
    return DCPTensorInfo(shape, dtype, tuple(part for part in parts if box_numel(part[0])))


def _are_disjoint(boxes: Iterable[Box]) -> bool:
    """Whether no element is in two boxes.

    Boxes are swept along the dimension with the most cuts, and each is compared only with those that overlap it there:
    for a tensor with a part on each of many ranks, comparing all pairs would take longer than reading it.
    """
    held = [box for box in boxes if box and box_numel(box)]
    if not held:
        return True
    along = max(range(len(held[0])), key=lambda d: len({box[d] for box in held}))
    reaching: list[Box] = []
    for box in sorted(held, key=lambda box: box[along]):
        reaching = [other for other in reaching if other[along][1] > box[along][0]]
        if any(_overlap(other, box) is not None for other in reaching):
            return False
        reaching.append(box)
    return True


def _plain_name(name: Any) -> str:
    if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"it names the file {name!r}, expected one in the same folder")
    return name


def write_metadata(directory: Path, infos: Mapping[str, DCPTensorInfo]) -> None:
    """Write the description of tensors whose files are in `directory`, for torch.distributed.checkpoint to read."""

    def describe(name: str, **attributes: Any) -> Described:
        return stand_in(METADATA, name)(state=attributes)

    entries: dict[str, Any] = {}
    places = {}
    for name, info in infos.items():
        chunks = []
        for number, (box, file, start, length) in enumerate(info.parts):
            offsets = torch.Size(low for low, _ in box)
            sizes = torch.Size(high - low for low, high in box)
            chunks.append(describe("ChunkStorageMetadata", offsets=offsets, sizes=sizes))
            place = {"relative_path": file, "offset": start, "length": length}
            index = describe("MetadataIndex", fqn=name, offset=offsets, index=number)
            places[index] = stand_in(FILES, "_StorageInfo")(state=place)
        # The state of TensorProperties: dtype, layout, requires_grad, memory format (0: contiguous), pinned.
        kind = (info.dtype, torch.strided, False, stand_in(METADATA, MEMORY_FORMAT)(0), False)
        properties = stand_in(METADATA, "TensorProperties")(state=kind)
        size = torch.Size(info.shape)
        entries[name] = describe("TensorStorageMetadata", properties=properties, size=size, chunks=chunks)
    metadata = describe(
        "Metadata",
        state_dict_metadata=entries,
        planner_data={name: (name,) for name in entries},
        storage_data=places,
        storage_meta=describe("StorageMeta", checkpoint_id=None, save_id=str(uuid.uuid4()), load_id=None, modules=[]),
        version=None,
    )
    (directory / ".metadata").write_bytes(pickled(metadata))
