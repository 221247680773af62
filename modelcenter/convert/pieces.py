"""Strided bijections between a region of a hub tensor and a region of one of ours.

Every layout change a checkpoint needs (transpose, split, concatenate, interleave by head, pad) moves elements
without changing them, and each is a set of *pieces*. A piece names one hub tensor, one native tensor, and a grid of
index axes that steps through both at once. Loading, reading a slice, exporting and proving that nothing is lost are
written once, on pieces; no operation needs a hand-written inverse.

In both tensors a piece covers the product of one index set per dimension, which is what makes `restrict` and `prove`
exact and cheap: they work dimension by dimension and never look at elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # users of the tables alone, such as `modelcenter info`, start without torch
    import torch

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # half-open [low, high) per dimension

HUB, NATIVE = 0, 1  # the two sides; every pair below is (hub, native)


@dataclass(frozen=True, slots=True)
class Axis:
    """One loop of a piece: index i moves by `i * strides[side]` along dimension `dims[side]`, on both sides at once."""

    size: int
    dims: tuple[int, int]
    strides: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """A bijection between a region of the hub tensor `names[HUB]` and one of the native tensor `names[NATIVE]`.

    The axes that share a dimension must be mixed-radix there: each stride exceeds the whole extent of the axes with
    smaller strides. `prove` rejects a piece that is not.
    """

    names: tuple[str, str]
    axes: tuple[Axis, ...]
    offsets: tuple[Shape, Shape]

    @property
    def numel(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def sizes(self) -> Shape:
        return tuple(axis.size for axis in self.axes)


def full_box(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def box_numel(box: Box) -> int:
    return prod(high - low for low, high in box)


def bounds(piece: Piece, side: int) -> Box:
    """The smallest box that contains the piece on one side."""
    low = list(piece.offsets[side])
    high = [x + 1 for x in low]
    for axis in piece.axes:
        high[axis.dims[side]] += (axis.size - 1) * axis.strides[side]
    return tuple(zip(low, high, strict=True))


def restrict(piece: Piece, side: int, box: Box) -> list[Piece]:
    """The part of `piece` inside `box` on one side, as disjoint pieces; empty if there is none."""
    parts = [piece]
    for dim, (low, high) in enumerate(box):
        parts = [q for p in parts for q in _restrict_dim(p, side, dim, low, high)]
    return parts


def _restrict_dim(piece: Piece, side: int, dim: int, low: int, high: int) -> Iterator[Piece]:
    axes = [k for k, axis in enumerate(piece.axes) if axis.dims[side] == dim]
    axes.sort(key=lambda k: -piece.axes[k].strides[side])
    origin = piece.offsets[side][dim]
    return _restrict_axes(piece, side, axes, low - origin, high - origin)


def _restrict_axes(piece: Piece, side: int, axes: list[int], low: int, high: int) -> Iterator[Piece]:
    """The parts of `piece` in [low, high) along the dimension of some of its axes, the widest stride first.

    `low` and `high` are relative to the first element of the piece.
    """
    if not axes:
        if low <= 0 < high:
            yield piece
        return
    k, inner_axes = axes[0], axes[1:]
    size, step = piece.axes[k].size, piece.axes[k].strides[side]
    inner = sum((piece.axes[j].size - 1) * piece.axes[j].strides[side] for j in inner_axes)
    first, last = max(0, low // step), min(size - 1, (high - 1) // step)  # blocks that may overlap
    full_first, full_last = max(first, -(-low // step)), min(last, (high - 1 - inner) // step)  # wholly inside
    partial: Iterable[int] = range(first, last + 1)
    if full_first <= full_last:
        partial = (*range(first, full_first), *range(full_last + 1, last + 1))
    for i in partial:
        yield from _restrict_axes(_take(piece, k, i, i + 1), side, inner_axes, low - i * step, high - i * step)
    if full_first <= full_last:
        yield _take(piece, k, full_first, full_last + 1)


def _take(piece: Piece, k: int, start: int, stop: int) -> Piece:
    """The piece with axis `k` limited to [start, stop)."""
    axis = piece.axes[k]
    offsets = [list(o) for o in piece.offsets]
    for side in (HUB, NATIVE):
        offsets[side][axis.dims[side]] += start * axis.strides[side]
    axes = tuple(replace(a, size=stop - start) if j == k else a for j, a in enumerate(piece.axes))
    return Piece(piece.names, axes, (tuple(offsets[HUB]), tuple(offsets[NATIVE])))


def split(piece: Piece, side: int) -> Iterator[Piece]:
    """Pieces that make up `piece`, each of which fills its bounding box on one side."""
    if piece.numel == box_numel(bounds(piece, side)):
        yield piece
        return
    extents = [high - low for low, high in bounds(piece, side)]
    for dim, extent in enumerate(extents):
        inside = [k for k, axis in enumerate(piece.axes) if axis.dims[side] == dim and axis.size > 1]
        if inside and prod(piece.axes[k].size for k in inside) < extent:
            widest = max(inside, key=lambda k: piece.axes[k].strides[side])
            for index in range(piece.axes[widest].size):
                yield from split(_take(piece, widest, index, index + 1), side)
            return


def view(tensor: torch.Tensor, piece: Piece, side: int, origin: Sequence[int] | None = None) -> torch.Tensor:
    """The elements of `piece` in `tensor`, shaped (axis sizes), as a view.

    Args:
        tensor: the whole tensor of that side, or the box of it that starts at `origin` and contains the piece.
    """
    start = [x - (origin[d] if origin is not None else 0) for d, x in enumerate(piece.offsets[side])]
    steps = tensor.stride()
    offset = tensor.storage_offset() + sum(x * s for x, s in zip(start, steps, strict=True))
    strides = [axis.strides[side] * steps[axis.dims[side]] for axis in piece.axes]
    return tensor.as_strided(piece.sizes, strides, offset)


def is_plain_copy(piece: Piece, tensor: torch.Tensor, origin: Sequence[int], side: int = NATIVE) -> bool:
    """Whether the piece is its whole bounding box of the other side in row-major order and contiguous in `tensor`.

    Then bytes of the other side can be read straight into `view(tensor, piece, side, origin)`.
    """
    other = 1 - side
    if piece.numel != box_numel(bounds(piece, other)):
        return False
    places = [(axis.dims[other], -axis.strides[other]) for axis in piece.axes if axis.size > 1]
    return places == sorted(places) and view(tensor, piece, side, origin).is_contiguous()


def export_box(
    pieces: Iterable[Piece], box: Box, native: Callable[[str], torch.Tensor], out: torch.Tensor
) -> torch.Tensor:
    """Fill `out`, the box of one hub tensor, from whole native tensors.

    Args:
        pieces: the pieces of that hub tensor.
        native: native name -> whole tensor.
    """
    origin = [low for low, _ in box]
    for piece in pieces:
        for part in restrict(piece, HUB, box):
            view(out, part, HUB, origin).copy_(view(native(part.names[NATIVE]), part, NATIVE))
    return out


class CoverageError(ValueError):
    """Some element of a tensor is not covered exactly once."""


def prove(
    pieces: Sequence[Piece],
    hub_shapes: Mapping[str, Sequence[int]],
    native_shapes: Mapping[str, Sequence[int]],
    pads: Mapping[str, Sequence[Box]] | None = None,
) -> None:
    """Prove that `pieces` is a bijection: every element of every tensor on both sides is covered exactly once.

    Uses shapes alone. Per tensor and dimension, indices that the same pieces contain are one class, so a tensor of any
    size is checked on a grid of a few cells.

    Args:
        hub_shapes, native_shapes: the tensors to cover; a piece may name no other.
        pads: boxes of native tensors that no hub element fills.

    Raises:
        CoverageError: names the tensor and the first index that is uncovered or covered twice.
    """
    for side, shapes in ((HUB, hub_shapes), (NATIVE, native_shapes)):
        by_name: dict[str, list[Piece]] = {name: [] for name in shapes}
        for piece in pieces:
            name = piece.names[side]
            if name not in by_name:
                raise CoverageError(f"{('hub', 'native')[side]} tensor {name!r} of a piece does not exist")
            by_name[name].append(piece)
        for name, covering in by_name.items():
            regions = [_index_sets(piece, side, shapes[name]) for piece in covering]
            if side == NATIVE:
                regions += [_box_sets(box, shapes[name]) for box in (pads or {}).get(name, ())]
            _prove_tensor(
                f"{('hub', 'native')[side]} tensor {name!r} of shape {tuple(shapes[name])}", regions, shapes[name]
            )


def _box_sets(box: Box, shape: Sequence[int]) -> list[torch.Tensor]:
    import torch

    masks = [torch.zeros(n, dtype=torch.bool) for n in shape]
    for mask, (low, high) in zip(masks, box, strict=True):
        mask[low:high] = True
    return masks


def _index_sets(piece: Piece, side: int, shape: Sequence[int]) -> list[torch.Tensor]:
    """Per dimension of the tensor, the set of indices that the piece covers, as a mask."""
    import torch

    if len(piece.offsets[side]) != len(shape):
        raise CoverageError(f"piece {piece} has {len(piece.offsets[side])} dimensions, tensor has shape {tuple(shape)}")
    masks = []
    for dim, size in enumerate(shape):
        index = torch.tensor([piece.offsets[side][dim]])
        for axis in piece.axes:
            if axis.dims[side] == dim:
                index = (index[:, None] + torch.arange(axis.size) * axis.strides[side]).flatten()
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
            raise CoverageError(f"piece {piece} leaves dimension {dim} of a tensor of shape {tuple(shape)}")
        mask = torch.zeros(size, dtype=torch.bool)
        mask[index] = True
        if int(mask.sum()) != index.numel():
            raise CoverageError(f"piece {piece} covers an index of dimension {dim} twice")
        masks.append(mask)
    return masks


def _prove_tensor(what: str, regions: list[list[torch.Tensor]], shape: Sequence[int]) -> None:
    import torch

    # Label the indices of each dimension so that two have the same label when the same regions contain both.
    labels, firsts, members = [], [], []
    for dim, size in enumerate(shape):
        label = torch.zeros(size, dtype=torch.long)
        distinct = {region[dim].numpy().tobytes(): region[dim] for region in regions}
        for mask in distinct.values():
            label = torch.unique(label * 2 + mask, return_inverse=True)[1]
        classes = int(label.max()) + 1 if size else 0
        first = torch.full((classes,), size).scatter_reduce_(0, label, torch.arange(size), "amin")
        labels.append(classes)
        firsts.append(first)
        members.append([region[dim][first] for region in regions])
    cover = torch.zeros(labels, dtype=torch.int16)
    for k in range(len(regions)):
        cell = torch.ones((), dtype=torch.int16)
        for dim in range(len(shape)):
            cell = cell[..., None] * members[dim][k].to(torch.int16)
        cover += cell
    wrong = (cover != 1).nonzero()
    if len(wrong):
        at = tuple(int(firsts[dim][c]) for dim, c in enumerate(wrong[0].tolist()))
        count = int(cover[tuple(wrong[0])])
        raise CoverageError(f"{what}: index {at} is covered {count} times, expected once")
