"""What a conversion writes: files whose every byte has its place before the first is written, and how one is filled.

Since a tensor's place follows from shapes alone, workers write tensors into the same files in any order, and none waits
for another.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import hash_ranges
from engine.ops.layout import crc32
from engine.ops.sha256 import Sha256, two_at_once, update
from modelcenter.convert.pieces import HUB, NATIVE, Box, box_numel, whole
from modelcenter.convert.stream import chunks
from modelcenter.hub.conversion.blocks import Blocks, read_blocks
from modelcenter.hub.conversion.checkpoint import Opened
from modelcenter.hub.conversion.workers import Report
from modelcenter.hub.files.atomic_directory import (
    Entry,
    FilePlan,
    file_head,
    make_file,
    plan_files,
    write_at,
    write_index,
)
from modelcenter.hub.files.dcp import MODEL, StoredInfo, write_metadata
from modelcenter.hub.files.reader import as_bytes, flat_bytes
from modelcenter.hub.files.torch_archive import frame

_PART_BYTES = 256 * 2**20  # of a tensor in a distributed checkpoint; torch reads a part whole
_SHARDS_BYTES = 256 * 2**20  # about, of one file of a distributed checkpoint, the work of one process at a time
_UNIT_BYTES = 8 * 2**20  # of small tensors that are written by the same process


Wrote = Callable[[str, str], None]  # name of a tensor, sha256 of its elements


@dataclass(frozen=True)
class Segment:
    """A box of a tensor that lies in one piece, in row-major order, from byte `start` of the file."""

    box: Box
    start: int


@dataclass(frozen=True)
class Job:
    """One tensor to write.

    Attributes:
        name: in the target. key: in the layout, on the target's side. file: relative to the target.
        framed: each segment is an archive of its own, as torch.distributed.checkpoint has them.
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
    """The files of weights of a target: their sizes, what each starts with, and the tensors to fill in."""

    side: int
    sizes: dict[str, int]
    heads: dict[str, bytes]
    jobs: list[Job]

    def prepare(self, directory: Path) -> None:
        """Make the files at their full size, with all but the tensors; raises OSError where the disk is too full."""
        for name, size in self.sizes.items():
            path = directory / name
            head = self.heads.get(name, b"")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not _is_made(path, size, head):
                make_file(path, size, head)
        if self.side == NATIVE:
            write_metadata(directory / MODEL, {job.name: _stored(job) for job in self.jobs})


def _is_made(path: Path, size: int, head: bytes) -> bool:
    """Whether an interrupted run made the file; its beginning may be lost although its size is not (no power)."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with open(path, "rb") as file:
        return file.read(len(head)) == head


def target_dtype(opened: Opened, side: int, key: str, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor of the target: that of what it is made of, or `wanted` if it is a number with a fraction.

    Raises:
        ValueError: it is made of tensors of several dtypes, and none is wanted.
    """
    parts = opened.stored_as(side, key)
    dtypes = {opened.source.dtype(name) for name in parts}
    if wanted is not None and all(dtype.is_floating_point for dtype in dtypes):
        return wanted
    if len(dtypes) > 1:
        held = ", ".join(f"{name} is {opened.source.dtype(name)}" for name in parts)
        raise ValueError(f"{opened.origin}: {key!r} is one tensor, but {held}; choose one with --dtype")
    return next(iter(dtypes))


def plan_hub(opened: Opened, wanted: torch.dtype | None, max_bytes: int) -> tuple[Plan, list[FilePlan]]:
    """A Hugging Face directory of everything that `opened` holds; also its FilePlans, for the index."""
    layout = opened.layout
    keys = {layout.written[key]: key for key in opened.keys()}
    held = set(keys.values())
    ties = [tie for tie in layout.ties.values() if tie.write and tie.to in held]
    keys.update({layout.written[tie.key]: tie.to for tie in ties})
    entries: list[Entry] = [
        (name, target_dtype(opened, HUB, key, wanted), layout.shapes[key]) for name, key in keys.items()
    ]
    files = plan_files(entries, max_bytes)
    plan = Plan(HUB, {}, {}, [])
    for file in files:
        plan.heads[file.name], places = file_head(file.entries)
        plan.sizes[file.name] = places[-1]
        for (name, dtype, shape), start in zip(file.entries, places, strict=False):
            plan.jobs.append(Job(name, keys[name], dtype, shape, file.name, (Segment(whole(shape), start),), False))
    return plan, files


def write_hub_index(directory: Path, files: Sequence[FilePlan]) -> None:
    if len(files) > 1:
        write_index(directory, files)


def plan_distributed(opened: Opened, wanted: torch.dtype | None) -> Plan:
    """A distributed checkpoint of everything that `opened` holds."""
    dtypes = {name: target_dtype(opened, NATIVE, name, wanted) for name in opened.natives()}
    sizes = {name: prod(opened.layout.native_shapes[name]) * dtype.itemsize for name, dtype in dtypes.items()}
    # Files of about one size, so that processes that take one each end together.
    total = sum(sizes.values())
    share = max(1, total // max(1, round(total / _SHARDS_BYTES)))
    plan, number, at, seen, end = Plan(NATIVE, {}, {}, []), 0, 0, 0, share
    for name, dtype in dtypes.items():
        shape = opened.layout.native_shapes[name]
        if at and seen >= end:
            number, at, end = number + 1, 0, (seen // share + 1) * share
        seen += sizes[name]
        file = f"{MODEL}/__{number}_0.distcp"
        segments = []
        for box in chunks(whole(shape), max(1, _PART_BYTES // dtype.itemsize)):
            before, after = frame(dtype, tuple(high - low for low, high in box), 0)
            segments.append(Segment(box, at + len(before)))
            at += len(before) + box_numel(box) * dtype.itemsize + len(after)
        plan.jobs.append(Job(name, name, dtype, shape, file, tuple(segments), True))
        plan.sizes[file] = at
    return plan


def _stored(job: Job) -> StoredInfo:
    parts = []
    for segment in job.segments:
        before, after = frame(job.dtype, tuple(high - low for low, high in segment.box), 0)
        length = len(before) + box_numel(segment.box) * job.dtype.itemsize + len(after)
        parts.append((segment.box, Path(job.file).name, segment.start - len(before), length))
    return StoredInfo(job.shape, job.dtype, tuple(parts))


# -- filling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Tensors that one process writes one after the other.

    Attributes:
        file: the whole file they are; None: they lie in a file among others.
    """

    jobs: tuple[Job, ...]
    file: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(job.nbytes for job in self.jobs)


def units_of(plan: Plan, written: Collection[str]) -> list[Unit]:
    """The work that is left, the largest first: files of a distributed checkpoint; of other files a tensor and those of
    its size, or smaller ones, that are written beside it."""
    left = [job for job in plan.jobs if job.name not in written]
    units = []
    if plan.side == NATIVE:
        whole_files = {file: tuple(job for job in plan.jobs if job.file == file) for file in plan.sizes}
        for file, jobs in whole_files.items():
            if not any(job.name in written for job in jobs):
                units.append(Unit(jobs, file))
        begun = {unit.file for unit in units}
        left = [job for job in left if job.file not in begun]
    units += [Unit(jobs) for jobs in _side_by_side(left)]
    return sorted(units, key=lambda unit: -unit.nbytes)


def _side_by_side(jobs: Sequence[Job]) -> Iterator[tuple[Job, ...]]:
    """Groups of a tensor with others of its size, or smaller ones, to be written beside it; none much of the whole, so
    that no process works on when the others are done."""
    most = sum(job.nbytes for job in jobs) // 16
    group: list[Job] = []
    size = 0
    for job in sorted(jobs, key=lambda job: -job.nbytes):
        group.append(job)
        size += job.nbytes
        if len(group) > 1 and size >= max(_UNIT_BYTES, min(2 * group[0].nbytes, most)):
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


class Filler:
    """Writes the tensors of a target, in one of the processes that do.

    Args:
        lock: held while a file is written that others write too.
    """

    def __init__(self, opened: Opened, side: int, directory: Path, lock: Any):
        self._side, self._directory, self._lock = side, directory, lock
        self._readers = [Blocks(opened) for _ in range(2 if two_at_once() else 1)]

    def write(self, unit: Unit, report: Report, wrote: Wrote) -> None:
        """Write the tensors of a unit; `wrote` is told the sha256 of the elements of each.

        Two at a time where two are hashed as fast as one.
        """
        lock = self._lock if unit.file is None else contextlib.nullcontext()
        jobs = iter(unit.jobs)

        def lane(reader: Blocks) -> Iterator[tuple[Sha256, torch.Tensor]]:
            for job in jobs:  # of all lanes
                digest = Sha256()
                for data in self._write(job, reader, report, lock):
                    yield digest, data
                wrote(job.name, digest.hexdigest())

        lanes = [lane(reader) for reader in self._readers]
        pieces = [next(one, None) for one in lanes]
        while busy := [piece for piece in pieces if piece is not None]:
            count = min(len(data) for _, data in busy)
            update(*((digest, data[:count]) for digest, data in busy))
            for i, piece in enumerate(pieces):
                if piece is not None:  # what it has more than the other waits for the other's next
                    digest, data = piece
                    pieces[i] = (digest, data[count:]) if len(data) > count else next(lanes[i], None)

    def _write(self, job: Job, reader: Blocks, report: Report, lock: Any) -> Iterator[torch.Tensor]:
        """Yields the bytes of each block, to be hashed before it is written and its memory used again."""
        handle = os.open(self._directory / job.file, os.O_WRONLY)

        def put(data: memoryview, at: int) -> int:
            with lock:
                write_at(handle, data, at)
            return at + len(data)

        try:
            for segment in job.segments:
                at, crc, shape = segment.start, 0, tuple(high - low for low, high in segment.box)
                if job.framed:
                    before, _ = frame(job.dtype, shape)
                    put(memoryview(before), at - len(before))
                for _, values in reader.of(self._side, job.key, segment.box, job.dtype):
                    data = flat_bytes(values)
                    yield data
                    if job.framed:
                        crc = crc32(data, crc)
                    at = put(as_bytes(data), at)
                    report(len(data))
                if job.framed:
                    put(memoryview(frame(job.dtype, shape, crc)[1]), at)
        finally:
            os.close(handle)


def file_parts(
    path: Path, size: int, jobs: Sequence[Job], written: Mapping[str, str]
) -> list[dict[str, list[list[int]] | str]]:
    """The parts of a manifest's entry of a file: the elements of each tensor, hashed as they were written, and what
    lies around them, which is little.

    Args:
        jobs: the tensors in it. written: name -> sha256 of the elements.
    """
    parts: list[dict[str, list[list[int]] | str]] = []
    spans: list[list[int]] = []
    for job in jobs:
        item = job.dtype.itemsize
        own = [[s.start, s.start + box_numel(s.box) * item] for s in job.segments if box_numel(s.box)]
        parts.append({"bytes": own, "sha256": written[job.name]})
        spans += own
    around, at = [], 0
    for first, end in [*sorted(spans), [size, size]]:
        if at < first:
            around.append([at, first])
        at = end
    with open(path, "rb", buffering=0) as file:
        return [*parts, {"bytes": around, "sha256": hash_ranges(file, around)}]


def hash_tensor(source: Any, name: str, report: Report) -> str:
    """The sha256 of a tensor's elements in row-major order, as a reader of the files finds them."""
    digest = hashlib.sha256()
    for values in read_blocks(source, name):
        digest.update(as_bytes(values))
        report(values.nbytes)
    return digest.hexdigest()
