"""Filling the files of a conversion: dividing the tensors among processes, and writing elements to their positions.

The position of each tensor follows from shapes alone, so workers write tensors into the same files in any order, and
none waits for another.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import hash_ranges
from engine.ops.layout import crc32
from engine.ops.sha256 import Sha256, two_at_once, update
from modelcenter.convert.pieces import NATIVE, box_numel
from modelcenter.hub.conversion.blocks import BlockReader, read_blocks
from modelcenter.hub.conversion.checkpoint import Checkpoint
from modelcenter.hub.conversion.plan import Job, Plan
from modelcenter.hub.conversion.progress import Report
from modelcenter.hub.files.raw_io import as_bytes, flat_bytes, write_at
from modelcenter.hub.files.torch_archive import archive_frame

_UNIT_BYTES = 8 * 2**20  # of small tensors written by the same process

OnWritten = Callable[[str, str], None]  # name of a tensor, sha256 of its elements


@dataclass(frozen=True)
class WorkUnit:
    """Tensors that one process writes.

    Attributes:
        file: the file that consists of them; None: their files also hold other tensors.
    """

    jobs: tuple[Job, ...]
    file: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(job.nbytes for job in self.jobs)


def work_units(plan: Plan, written: Collection[str]) -> list[WorkUnit]:
    """The remaining work, largest units first: whole files of a distributed checkpoint; in other files, tensors grouped
    by _side_by_side."""
    left = [job for job in plan.jobs if job.name not in written]
    units = []
    if plan.side == NATIVE:
        whole_files = {file: tuple(job for job in plan.jobs if job.file == file) for file in plan.sizes}
        for file, jobs in whole_files.items():
            if not any(job.name in written for job in jobs):
                units.append(WorkUnit(jobs, file))
        begun = {unit.file for unit in units}
        left = [job for job in left if job.file not in begun]
    units += [WorkUnit(jobs) for jobs in _side_by_side(left)]
    return sorted(units, key=lambda unit: -unit.nbytes)


def _side_by_side(jobs: Sequence[Job]) -> Iterator[tuple[Job, ...]]:
    """Group each large tensor with others of its size or smaller ones, to be written side by side. No group is a large
    part of the whole, so that all processes finish at about the same time."""
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
    """Writes the tensors of a target in one of several processes.

    Args:
        lock: held while writing to a file that other processes write to.
    """

    def __init__(self, checkpoint: Checkpoint, side: int, directory: Path, lock: Any):
        self._side, self._directory, self._lock = side, directory, lock
        self._readers = [BlockReader(checkpoint) for _ in range(2 if two_at_once() else 1)]

    def write(self, unit: WorkUnit, report: Report, on_written: OnWritten) -> None:
        """Write the tensors of a unit; `on_written` is called with the name and sha256 of each.

        Two are hashed at a time if that takes no longer than one.
        """
        lock = self._lock if unit.file is None else contextlib.nullcontext()
        jobs = iter(unit.jobs)

        def lane(reader: BlockReader) -> Iterator[tuple[Sha256, torch.Tensor]]:
            for job in jobs:  # shared by all lanes
                digest = Sha256()
                for data in self._write(job, reader, report, lock):
                    yield digest, data
                on_written(job.name, digest.hexdigest())

        lanes = [lane(reader) for reader in self._readers]
        pieces = [next(one, None) for one in lanes]
        while busy := [piece for piece in pieces if piece is not None]:
            count = min(len(data) for _, data in busy)
            update(*((digest, data[:count]) for digest, data in busy))
            for i, piece in enumerate(pieces):
                if piece is not None:  # bytes beyond the shorter piece are hashed with the other lane's next one
                    digest, data = piece
                    pieces[i] = (digest, data[count:]) if len(data) > count else next(lanes[i], None)

    def _write(self, job: Job, reader: BlockReader, report: Report, lock: Any) -> Iterator[torch.Tensor]:
        """Yield the bytes of each block, to be hashed before it is written and its memory reused."""
        handle = os.open(self._directory / job.file, os.O_WRONLY)

        def put(data: memoryview, at: int) -> int:
            with lock:
                write_at(handle, data, at)
            return at + len(data)

        try:
            for segment in job.segments:
                at, crc, shape = segment.start, 0, tuple(high - low for low, high in segment.box)
                if job.framed:
                    before, _ = archive_frame(job.dtype, shape)
                    put(memoryview(before), at - len(before))
                for _, values in reader.read(self._side, job.key, segment.box, job.dtype):
                    data = flat_bytes(values)
                    yield data
                    if job.framed:
                        crc = crc32(data, crc)
                    at = put(as_bytes(data), at)
                    report(len(data))
                if job.framed:
                    put(memoryview(archive_frame(job.dtype, shape, crc)[1]), at)
        finally:
            os.close(handle)


def file_parts(
    path: Path, size: int, jobs: Sequence[Job], written: Mapping[str, str]
) -> list[dict[str, list[list[int]] | str]]:
    """The parts of a file's entry in the manifest: the elements of each tensor, hashed as they were written, and the
    few bytes around them.

    Args:
        jobs: the tensors in the file, in order. written: name -> sha256 of the elements.
    """
    parts: list[dict[str, list[list[int]] | str]] = []
    spans: list[list[int]] = []
    for job in jobs:
        item = job.dtype.itemsize
        own = [[s.start, s.start + box_numel(s.box) * item] for s in job.segments]
        parts.append({"bytes": own, "sha256": written[job.name]})
        spans += own
    around, at = [], 0
    for first, end in [*spans, [size, size]]:
        if at < first:
            around.append([at, first])
        at = end
    with open(path, "rb", buffering=0) as file:
        return [*parts, {"bytes": around, "sha256": hash_ranges(file, around)}]


def hash_tensor(source: Any, name: str, report: Report) -> str:
    """The sha256 of a tensor's elements in row-major order, read back from the files."""
    digest = hashlib.sha256()
    for values in read_blocks(source, name):
        digest.update(as_bytes(values))
        report(values.nbytes)
    return digest.hexdigest()
