"""Reading a tensor of either side of a checkpoint in row-major order, in blocks that fit into the CPU's cache.

A block is read, hashed and written before the next one, in reused memory, so that every element is moved from and to
main memory once.
"""

from collections.abc import Iterator, Sequence

import torch

from modelcenter.convert.pieces import HUB, NATIVE, Axis, Box, Piece, box_numel, full_box, restrict, view
from modelcenter.convert.stream import ReadBuffer, chunks, copy_values, fill_box, zero_pads
from modelcenter.hub.conversion.checkpoint import Checkpoint, TensorSource

_BLOCK_BYTES = 4 * 2**20
_HELD_BYTES = 128 * 2**20  # maximum memory for a tensor whose elements are reordered
_ALIGNMENT = 64


def keeps_order(piece: Piece) -> bool:
    """Whether a piece visits the elements of both sides in the same order, so that rows stay rows."""

    def order(side: int) -> list[Axis]:
        return sorted((a for a in piece.axes if a.size > 1), key=lambda a: (a.dims[side], -a.strides[side]))

    return order(HUB) == order(NATIVE)


def _cut(box: Box, dtype: torch.dtype, size: int) -> Iterator[Box]:
    return chunks(box, max(1, size // dtype.itemsize))


def read_blocks(source: TensorSource, name: str) -> Iterator[torch.Tensor]:
    """Yield a tensor of a source in blocks, each valid until the next."""
    info, buffer = source.tensors[name], ReadBuffer()
    for block in _cut(full_box(info.shape), info.dtype, _BLOCK_BYTES):
        yield source.read(name, block, buffer.tensor(block, info.dtype))


class BlockReader:
    """Reads blocks of one checkpoint. A block is valid until the next one is read."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._buffer, self._read_buffer = ReadBuffer(), ReadBuffer()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._held: dict[str, torch.Tensor] = {}  # whole tensors of the source, in `_memory`

    def read(self, side: int, key: str, box: Box, dtype: torch.dtype) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield (block, its values: contiguous, on the CPU) for the blocks that `box` of a tensor consists of.

        The blocks depend only on `box` and `dtype`, not on the checkpoint.
        """
        checkpoint = self._checkpoint
        reordered = side != checkpoint.side and not all(keeps_order(piece) for piece in checkpoint.pieces(side, key))
        names = checkpoint.source_names(side, key) if reordered else []
        held = reordered and self._hold(names)
        for part in _cut(box, dtype, _HELD_BYTES):
            blocks = _cut(part, dtype, _BLOCK_BYTES)
            if held:
                for block in blocks:
                    yield block, self._take_from_held(side, key, block, dtype)
            elif reordered:
                values, start = torch.empty([high - low for low, high in part], dtype=dtype), part
                self._fill(side, key, part, values)
                for block in blocks:
                    inside = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(block, start, strict=True))
                    yield block, values[inside]
            else:
                for block in blocks:
                    yield block, self._read_block(side, key, block, dtype)

    def _read_block(self, side: int, key: str, block: Box, dtype: torch.dtype) -> torch.Tensor:
        checkpoint = self._checkpoint
        if side == checkpoint.side:
            name = checkpoint.names[key]
            stored = self._buffer.tensor(block, checkpoint.source.dtype(name))
            return checkpoint.source.read(name, block, stored).to(dtype)
        out = self._buffer.tensor(block, dtype)
        self._fill(side, key, block, out)
        return out

    def _fill(self, side: int, key: str, box: Box, out: torch.Tensor) -> None:
        checkpoint = self._checkpoint
        pieces, pads = checkpoint.pieces(side, key), self._pads(side, key)
        fill_box(pieces, side, box, out, checkpoint.source, checkpoint.names, pads, self._read_buffer)

    @torch.no_grad()
    def _take_from_held(self, side: int, key: str, block: Box, dtype: torch.dtype) -> torch.Tensor:
        """Build a block from held tensors."""
        out, origin = self._buffer.tensor(block, dtype), [low for low, _ in block]
        zero_pads(out, block, self._pads(side, key))
        for piece in self._checkpoint.pieces(side, key):
            for part in restrict(piece, side, block):
                values = self._held[self._checkpoint.names[part.names[1 - side]]]
                copy_values(view(out, part, side, origin), view(values, part, 1 - side))
        return out

    def _pads(self, side: int, key: str) -> Sequence[Box]:
        return self._checkpoint.layout.pads.get(key, ()) if side == NATIVE else ()

    def _hold(self, names: Sequence[str]) -> bool:
        """Hold these tensors of the source in memory; False if they are too large. Tensors already held are not
        read again, as for the parts of a fused tensor."""
        if all(name in self._held for name in names):
            return True
        source, at, places = self._checkpoint.source, 0, []
        for name in names:
            info = source.tensors[name]
            size = box_numel(full_box(info.shape)) * info.dtype.itemsize
            places.append((name, tuple(info.shape), info.dtype, at, at + size))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        if at > _HELD_BYTES:
            return False
        self._held = {}
        if not len(self._memory):
            self._memory = torch.empty(_HELD_BYTES, dtype=torch.uint8)  # pages are allocated when first written
        for name, shape, dtype, low, high in places:
            self._held[name] = source.read(name, full_box(shape), self._memory[low:high].view(dtype).view(shape))
        return True
