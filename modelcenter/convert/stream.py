"""Filling local slices of a model from a checkpoint, reading only the required data, in the order of the file.

Besides the destination, at most a chunk of a tensor is held in memory.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from engine.ops.layout import transpose_
from modelcenter.convert.layout import Layout
from modelcenter.convert.match import Match
from modelcenter.convert.pieces import (
    NATIVE,
    Box,
    Piece,
    bounds,
    box_numel,
    export_box,
    full_box,
    is_plain_copy,
    restrict,
    view,
)

CHUNK_BYTES = 8 * 2**20  # maximum part of a hub tensor in memory, so that it stays in the CPU cache
_LINES = 32  # rows of a chunk are a multiple of this, the 2-byte numbers in a cache line, for transposes

Job = TypeVar("Job")
Target = tuple[str, Sequence[int], torch.Tensor]  # native name, offset of the local slice in the tensor, local slice


class Source(Protocol):
    """A checkpoint's tensors, read by boxes (hub.files has them)."""

    def position(self, name: str) -> tuple[str, int]:
        """(file, offset in it) of a tensor, for reading in order."""

    def dtype(self, name: str) -> torch.dtype: ...

    def cost(self, name: str, box: Box) -> int:
        """The number of bytes that reading the box reads from the file, including skipped gaps."""

    def read(self, name: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """That box of a tensor, on the CPU; into `out`, contiguous and of the same shape and dtype, if given."""


class ReadBuffer:
    """Memory that is reused from box to box, so that pages are not allocated anew for each."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensor(self, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of the shape of `box`, in the memory of the previous one."""
        size = box_numel(box) * dtype.itemsize
        if size > len(self._bytes):
            self._bytes = torch.empty(max(size, 2**20), dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view([high - low for low, high in box])


@dataclass(frozen=True)
class _Destination:
    """The destination of values of a checkpoint: the part of a piece inside a local slice."""

    piece: Piece  # restricted to the target
    local: torch.Tensor
    origin: tuple[int, ...]  # of the local slice in its tensor
    side: int = NATIVE  # of the target; the source is read on the other

    def view_of(self, piece: Piece) -> torch.Tensor:
        return view(self.local, piece, self.side, self.origin)


@torch.no_grad()
def fill_targets(layout: Layout, match: Match, source: Source, targets: Iterable[Target], threads: int = 1) -> None:
    """Copy the tensors of a checkpoint into local slices of a model; boxes that nothing fills become zero.

    Args:
        match: which tensors to load (match_names).
        source: with several threads, it must support concurrent reads.
        targets: the slices that this process holds; those of parameters that no loaded tensor fills do not change.
        threads: number of reading threads; each holds a chunk.

    Raises:
        ValueError: the file repeats a tied tensor with other values.
    """
    by_name: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, offsets, local in targets:
        local = local.detach()
        box = tuple((start, start + size) for start, size in zip(offsets, local.shape, strict=True))
        by_name.setdefault(name, []).append((box, local))
    for name, boxes in layout.pads.items():
        for box, local in by_name.get(name, ()):
            zero_pads(local, box, boxes)

    def destinations_of(key: str) -> list[_Destination]:
        return [
            _Destination(part, local, tuple(low for low, _ in box))
            for piece in layout.pieces[key]
            for box, local in by_name.get(piece.names[NATIVE], ())
            for part in restrict(piece, NATIVE, box)
        ]

    jobs = [(name, key) for key, name in match.found.items()]
    jobs.sort(key=lambda job: source.position(job[0]))
    run_in_threads(lambda job, buffer: _load(source, job[0], destinations_of(job[1]), buffer), jobs, threads)
    for name, key in match.repeats:  # after the tensors that they repeat
        _compare(source, name, match.found[key], destinations_of(key), layout.advice_on_repeat(name))


def run_in_threads(work: Callable[[Job, ReadBuffer], None], jobs: Iterable[Job], threads: int) -> None:
    """Run `work(job, buffer)` for each job, started in order, in threads with a `ReadBuffer` each.

    Raises the first error of a job. Reading from files and `copy_values` run in parallel.
    """
    if threads == 1:
        buffer = ReadBuffer()
        for job in jobs:
            work(job, buffer)
        return
    own = threading.local()

    def start() -> None:
        own.buffer = ReadBuffer()

    with ThreadPoolExecutor(threads, initializer=start) as pool:
        for _ in pool.map(lambda job: work(job, own.buffer), jobs):
            pass


def zero_pads(local: torch.Tensor, box: Box, pads: Iterable[Box]) -> None:
    """Zero the parts inside `pads` of a slice that is `box` of its tensor."""
    for pad in pads:
        both = [(max(a, c) - a, min(b, d) - a) for (a, b), (c, d) in zip(box, pad, strict=True)]
        if all(low < high for low, high in both):
            local[tuple(slice(low, high) for low, high in both)] = 0


def _load(source: Source, name: str, destinations: list[_Destination], buffer: ReadBuffer) -> None:
    dtype, others = source.dtype(name), []
    for destination in destinations:
        local, side = destination.local, destination.side
        if (
            local.dtype == dtype
            and local.device.type == "cpu"
            and is_plain_copy(destination.piece, local, destination.origin, side)
        ):
            source.read(name, bounds(destination.piece, 1 - side), destination.view_of(destination.piece))
        else:
            others.append(destination)
    for destination, piece, values in _stream(source, name, others, buffer):
        copy_values(destination.view_of(piece), values)


def _compare(source: Source, name: str, loaded: str, destinations: list[_Destination], advice: str) -> None:
    for destination, piece, values in _stream(source, name, destinations, ReadBuffer()):
        here = destination.view_of(piece)
        if not torch.allclose(here, values.to(here.dtype).to(here.device), rtol=0, atol=0, equal_nan=True):
            raise ValueError(f"tensor {name!r} should repeat {loaded!r} (they are tied), but its values differ{advice}")


def _stream(
    source: Source, name: str, destinations: list[_Destination], buffer: ReadBuffer
) -> Iterator[tuple[_Destination, Piece, torch.Tensor]]:
    """Read the hub tensor in chunks, into `buffer`; yield (destination, its piece of the chunk, the values there)."""
    if not destinations:
        return
    side, dtype = 1 - destinations[0].side, source.dtype(name)
    region = _union([bounds(destination.piece, side) for destination in destinations])
    for chunk in chunks(region, CHUNK_BYTES // dtype.itemsize):
        inside = [
            (destination, piece) for destination in destinations for piece in restrict(destination.piece, side, chunk)
        ]
        for group in _groups(source, name, inside, side):
            box = _union([bounds(piece, side) for _, piece in group])
            values = source.read(name, box, buffer.tensor(box, dtype))
            for destination, piece in group:
                yield destination, piece, view(values, piece, side, [low for low, _ in box])


def _union(boxes: Sequence[Box]) -> Box:
    return tuple((min(low for low, _ in dim), max(high for _, high in dim)) for dim in zip(*boxes, strict=True))


def chunks(box: Box, limit: int) -> Iterator[Box]:
    """Split a box along its leading dimensions into boxes of at most `limit` elements."""
    if box_numel(box) <= limit or not box:
        yield box
        return
    (low, high), rest = box[0], box[1:]
    step = max(1, limit // max(1, box_numel(rest)))
    step -= step % _LINES if step > _LINES else 0
    for start in range(low, high, step):
        if step > 1 or box_numel(rest) <= limit:
            yield ((start, min(start + step, high)), *rest)
        else:
            yield from (((start, start + 1), *inner) for inner in chunks(rest, limit))


def _groups(
    source: Source, name: str, items: list[tuple[_Destination, Piece]], side: int
) -> list[list[tuple[_Destination, Piece]]]:
    """Group items that one read can serve without reading more than separate reads."""
    groups: list[list[tuple[_Destination, Piece]]] = []
    boxes: list[Box] = []
    for item in items:
        box = bounds(item[1], side)
        for g, other in enumerate(boxes):
            both = _union([box, other])
            if source.cost(name, both) <= source.cost(name, box) + source.cost(name, other):
                groups[g].append(item)
                boxes[g] = both
                break
        else:
            groups.append([item])
            boxes.append(box)
    return groups


@torch.no_grad()
def fill_box(
    pieces: Sequence[Piece],
    side: int,
    box: Box,
    out: torch.Tensor,
    source: Source,
    names: Mapping[str, str],
    pads: Sequence[Box],
    buffer: ReadBuffer,
) -> None:
    """Fill `out`, a box of one tensor of either side, from a source that holds the other side.

    Args:
        pieces: all pieces of that tensor. side: its side in them.
        names: {name on the other side: name in the source}.
        pads: boxes of the tensor that nothing fills; they become zero.
        buffer: for intermediate reads; not the one that holds `out`.
    """
    zero_pads(out, box, pads)
    by_name: dict[str, list[_Destination]] = {}
    for piece in pieces:
        for part in restrict(piece, side, box):
            found = _Destination(part, out, tuple(low for low, _ in box), side)
            by_name.setdefault(names[piece.names[1 - side]], []).append(found)
    for name, destinations in by_name.items():
        _load(source, name, destinations, buffer)


@torch.no_grad()
def read_into(source: Source, name: str, offsets: Sequence[int], local: torch.Tensor, buffer: ReadBuffer) -> None:
    """Fill a local slice, which starts at `offsets`, from the tensor of the same layout, in chunks if need be."""
    local = local.detach()
    box = tuple((start, start + size) for start, size in zip(offsets, local.shape, strict=True))
    if local.device.type == "cpu" and local.dtype == source.dtype(name) and local.is_contiguous():
        source.read(name, box, local)
        return
    for part in chunks(box, CHUNK_BYTES // source.dtype(name).itemsize):
        place = tuple(slice(low - start, high - start) for (low, high), start in zip(part, offsets, strict=True))
        local[place].copy_(source.read(name, part, buffer.tensor(part, source.dtype(name))))


def copy_values(target: torch.Tensor, values: torch.Tensor) -> None:
    """`target.copy_(values)`; a transpose is copied in square blocks that stay in the CPU cache."""
    same = target.dtype == values.dtype and target.device.type == values.device.type == "cpu"
    into, of = target.squeeze(), values.squeeze()
    if into.dim() == 2 and into.stride(0) == 1 < into.stride(1):
        into, of = into.t(), of.t()
    if same and into.dim() == 2 and into.stride(1) == of.stride(0) == 1 < of.stride(1):
        transpose_(into, of.t())
    else:
        target.copy_(values)


def export_tensor(layout: Layout, key: str, natives: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One hub tensor, contiguous, from the whole native tensors it consists of (Layout.natives); all of one dtype."""
    pieces = layout.pieces[key]
    if len(pieces) == 1:
        (native,) = natives.values()
        moved = view(native, pieces[0], NATIVE)
        if is_plain_copy(pieces[0], native, [0] * native.dim()) and moved.numel() == native.numel():
            return moved.reshape(layout.shapes[key])
    out = next(iter(natives.values())).new_empty(layout.shapes[key])
    return export_box(pieces, full_box(layout.shapes[key]), natives.__getitem__, out)
