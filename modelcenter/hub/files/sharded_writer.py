"""Export of a sharded model: each rank writes its part of every tensor to its place in the final files.

Places follow from the shapes alone, so nothing is gathered and no rank waits for another. All ranks must see the files.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

import engine
from modelcenter.convert.layout import Layout
from modelcenter.convert.pieces import HUB, NATIVE, Box, Piece, bounds, box_numel, is_plain_copy, restrict, split, view
from modelcenter.convert.stream import ReadBuffer, chunks, copy_values
from modelcenter.hub.files.raw_io import allocate_file, as_bytes, write_at
from modelcenter.hub.files.safetensors import FilePlan, file_head

_BLOCK_BYTES = 2**20  # of reordered elements, small enough to stay in the cache until they are written


class _Place(NamedTuple):
    """The destination of a piece of one of our parameters: a tensor in a file."""

    piece: Piece
    file: str
    start: int  # byte of the tensor's first element
    shape: tuple[int, ...]
    dtype: torch.dtype


class ShardedWriter:
    """Writes the files of an export from all ranks; created alike on every rank.

    Args:
        key_of: name in the files -> key of the layout.
    """

    def __init__(self, directory: Path, files: Sequence[FilePlan], layout: Layout, key_of: Mapping[str, str]):
        self._directory, self._files = directory, files
        self._places: dict[str, list[_Place]] = {}
        self.numel = 0
        for file in files:
            for (name, dtype, shape), start in zip(file.entries, file_head(file.entries)[1], strict=False):
                self.numel += prod(shape)
                for piece in layout.pieces[key_of[name]]:
                    place = _Place(piece, file.name, start, shape, dtype)
                    self._places.setdefault(piece.names[NATIVE], []).append(place)

    def allocate(self) -> None:
        """Create the files at their full size, with their headers; call it on one rank, before any rank writes."""
        for file in self._files:
            head, places = file_head(file.entries)
            allocate_file(self._directory / file.name, places[-1], head)

    def is_visible(self) -> bool:
        """Whether this rank sees the files that rank 0 made."""
        return all((self._directory / file.name).is_file() for file in self._files)

    @torch.no_grad()
    def write(self, model: torch.nn.Module) -> int:
        """Write the elements that this rank holds and no lower rank does, and flush them to the disk; returns their
        number."""
        done, buffer = 0, ReadBuffer()
        with ExitStack() as stack:
            handles: dict[str, int] = {}
            for name, offsets, held in engine.local_slices(model, owned=True):
                places = self._places.get(name, ())
                local = held.detach().cpu() if places else held
                for place in places:
                    if place.file not in handles:
                        handles[place.file] = os.open(self._directory / place.file, os.O_WRONLY)
                        stack.callback(os.close, handles[place.file])
                    done += _write_slice(handles[place.file], place, local, offsets, buffer)
            for handle in handles.values():
                os.fsync(handle)
        return done


def _write_slice(handle: int, place: _Place, local: torch.Tensor, offsets: Sequence[int], buffer: ReadBuffer) -> int:
    """Write the elements of a local slice that belong to one place; returns their number."""
    done = 0
    box = tuple((low, low + size) for low, size in zip(offsets, local.shape, strict=True))
    for part in restrict(place.piece, NATIVE, box):
        for dense in split(part, HUB):
            for block, data in _blocks(dense, local, offsets, place.dtype, buffer):
                _put(handle, data, place.start, block, place.shape, place.dtype.itemsize)
        done += part.numel
    return done


def _blocks(
    piece: Piece, local: torch.Tensor, offsets: Sequence[int], dtype: torch.dtype, buffer: ReadBuffer
) -> Iterator[tuple[Box, memoryview]]:
    """(block, its bytes) of the box that a piece of a local slice fills in the tensor of the file."""
    box = bounds(piece, HUB)
    if local.dtype == dtype and is_plain_copy(piece, local, offsets):
        yield box, as_bytes(view(local, piece, NATIVE, offsets))
        return
    for block in chunks(box, max(1, _BLOCK_BYTES // dtype.itemsize)):
        out = buffer.tensor(block, dtype)
        for part in restrict(piece, HUB, block):
            copy_values(view(out, part, HUB, [low for low, _ in block]), view(local, part, NATIVE, offsets))
        yield block, as_bytes(out)


def _put(handle: int, data: memoryview, start: int, box: Box, shape: Sequence[int], item: int) -> None:
    """Write a box of the tensor with this shape whose first element is at byte `start`, by contiguous runs."""
    inner = len(shape)  # dimensions from here on are covered completely
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    outer = max(inner - 1, 0)  # the box may cut the dimension before them and still be one run
    steps = [item * prod(shape[d + 1 :]) for d in range(len(shape))]
    size = item * box_numel(box[outer:])
    first = start + sum(low * step for (low, _), step in zip(box, steps, strict=True))
    for number, index in enumerate(itertools.product(*(range(high - low) for low, high in box[:outer]))):
        at = first + sum(i * step for i, step in zip(index, steps, strict=False))
        write_at(handle, data[number * size : (number + 1) * size], at)
