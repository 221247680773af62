"""Planning a conversion: the files of the target, in which the position of every byte is known in advance."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from modelcenter.convert.pieces import HUB, NATIVE, Box, box_numel, full_box
from modelcenter.convert.stream import chunks
from modelcenter.hub.conversion.checkpoint import Checkpoint
from modelcenter.hub.files.dcp import MODEL_FOLDER, DCPTensorInfo, write_metadata
from modelcenter.hub.files.raw_io import allocate_file
from modelcenter.hub.files.safetensors import Entry, FilePlan, file_head, plan_files
from modelcenter.hub.files.torch_archive import archive_frame

_PART_BYTES = 256 * 2**20  # maximum size of a part of a tensor in a distributed checkpoint; torch reads a part whole
_SHARDS_BYTES = 256 * 2**20  # approximate size of a file of a distributed checkpoint, written by one process at a time


@dataclass(frozen=True)
class Segment:
    """A box of a tensor, stored contiguously in row-major order from byte `start` of the file."""

    box: Box
    start: int


@dataclass(frozen=True)
class Job:
    """One tensor to write.

    Attributes:
        name: in the target. key: in the layout, on the target's side. file: relative to the target.
        framed: each segment is an archive of its own, as in torch.distributed.checkpoint.
    """

    name: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    segments: tuple[Segment, ...]
    framed: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Plan:
    """The weight files of a target: their sizes, their first bytes, and the tensors to fill in."""

    side: int
    sizes: dict[str, int]
    heads: dict[str, bytes]
    jobs: list[Job]

    def prepare(self, directory: Path) -> None:
        """Create the files at full size, with everything but the tensors; raises OSError if the disk is too full."""
        for name, size in self.sizes.items():
            path = directory / name
            head = self.heads.get(name, b"")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not _is_made(path, size, head):
                allocate_file(path, size, head)
        if self.side == NATIVE:
            write_metadata(directory / MODEL_FOLDER, {job.name: _stored(job) for job in self.jobs})


def _is_made(path: Path, size: int, head: bytes) -> bool:
    """Whether an interrupted run created the file. A power cut may lose its first bytes although its size is right."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with open(path, "rb") as file:
        return file.read(len(head)) == head


def target_dtype(checkpoint: Checkpoint, side: int, key: str, requested: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor of the target: `requested`; if None, and for buffers, that of the tensors it consists of.

    Raises:
        ValueError: it consists of tensors with different dtypes, and none is requested.
    """
    if requested is not None and key not in checkpoint.layout.buffer_names:
        return requested
    parts = checkpoint.source_names(side, key)
    dtypes = {checkpoint.source.dtype(name) for name in parts}
    if len(dtypes) > 1:
        held = ", ".join(f"{name} is {checkpoint.source.dtype(name)}" for name in parts)
        raise ValueError(f"{checkpoint.origin}: {key!r} is a single tensor, but {held}; choose a dtype with --dtype")
    return next(iter(dtypes))


def plan_hub(checkpoint: Checkpoint, dtype: torch.dtype | None, shard_bytes: int) -> tuple[Plan, list[FilePlan]]:
    """Plan a Hugging Face directory with everything in `checkpoint`; also returns its FilePlans, for the index."""
    layout = checkpoint.layout
    keys = {layout.written[key]: key for key in checkpoint.hub_keys()}
    held = set(keys.values())
    ties = [tie for tie in layout.ties.values() if tie.write and tie.to in held]
    keys.update({layout.written[tie.hub]: tie.to for tie in ties})
    entries: list[Entry] = [
        (name, target_dtype(checkpoint, HUB, key, dtype), layout.shapes[key]) for name, key in keys.items()
    ]
    files = plan_files(entries, shard_bytes)
    sizes, heads, jobs = {}, {}, []
    for file in files:
        heads[file.name], starts = file_head(file.entries)
        sizes[file.name] = starts[-1]
        for (name, kind, shape), start in zip(file.entries, starts, strict=False):
            jobs.append(Job(name, keys[name], kind, shape, file.name, (Segment(full_box(shape), start),), False))
    return Plan(HUB, sizes, heads, jobs), files


def plan_distributed(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Plan:
    """Plan a distributed checkpoint with everything in `checkpoint`."""
    shapes = checkpoint.layout.native_shapes
    dtypes = {name: target_dtype(checkpoint, NATIVE, name, dtype) for name in checkpoint.native_names()}
    jobs, sizes = [], {}
    for number, names in enumerate(_even_groups({name: prod(shapes[name]) * d.itemsize for name, d in dtypes.items()})):
        file, end = f"{MODEL_FOLDER}/__{number}_0.distcp", 0
        for name in names:
            segments, end = _archive_segments(dtypes[name], shapes[name], end)
            jobs.append(Job(name, name, dtypes[name], shapes[name], file, segments, True))
        sizes[file] = end
    return Plan(NATIVE, sizes, {}, jobs)


def _even_groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Group tensors, in order, into groups of similar size, so that processes with one each finish together."""
    total = sum(sizes.values())
    share = max(1, total // max(1, round(total / _SHARDS_BYTES)))
    group: list[str] = []
    seen, end = 0, share
    for name, size in sizes.items():
        if seen >= end:
            yield group
            group, end = [], (seen // share + 1) * share
        seen += size
        group.append(name)
    if group:
        yield group


def _archive_segments(dtype: torch.dtype, shape: tuple[int, ...], at: int) -> tuple[tuple[Segment, ...], int]:
    """The archives of a tensor, one after another from byte `at` of a file on; also returns where they end."""
    segments = []
    for box in chunks(full_box(shape), max(1, _PART_BYTES // dtype.itemsize)):
        before, after = archive_frame(dtype, tuple(high - low for low, high in box), 0)
        segments.append(Segment(box, at + len(before)))
        at += len(before) + box_numel(box) * dtype.itemsize + len(after)
    return tuple(segments), at


def _stored(job: Job) -> DCPTensorInfo:
    parts = []
    for segment in job.segments:
        before, after = archive_frame(job.dtype, tuple(high - low for low, high in segment.box), 0)
        length = len(before) + box_numel(segment.box) * job.dtype.itemsize + len(after)
        parts.append((segment.box, Path(job.file).name, segment.start - len(before), length))
    return DCPTensorInfo(job.shape, job.dtype, tuple(parts))
