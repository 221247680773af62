"""Low-rank updates in Hugging Face's modules and in ours, by the pieces of the conversion rules.

A linear layer of ours computes W x + s B A x. The hub's tensor that holds W may hold other layers' weights beside it
(GPT-2's c_attn, GPT-NeoX's interleaved query_key_value). Its update is then one block-diagonal adapter: the A of all
parts one below the other, and a B that has each part's columns at that part's rows. The other way round a part takes
its rows of B and the columns that are not zero there. Both are exact: elements move, none is computed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from modelcenter.convert.layout import Layout
from modelcenter.convert.pieces import HUB, NATIVE, Piece

WEIGHT = ".weight"


@dataclass(frozen=True)
class LowRankUpdate:
    """A low-rank update of one linear layer, W + scale * b @ a.

    a: (rank, in). b: (out, rank). magnitude: (out,), the norms of DoRA's rows, None without.
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Block:
    """Where a linear layer of ours lies in a hub module: its row `rows[NATIVE][i]` is `rows[HUB][i]` there."""

    native: str
    rows: tuple[Tensor, Tensor]
    cols: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HubModule:
    """A linear module of transformers' model, with the layers of ours that make it up.

    Attributes:
        name: in the model of the task. key: of its weight in the layout.
        outputs, inputs: features. transposed: its weight is (in, out), as Conv1D's.
    """

    name: str
    key: str
    outputs: int
    inputs: int
    transposed: bool
    blocks: tuple[Block, ...]


def _indices(piece: Piece, dim: int) -> tuple[Tensor, Tensor]:
    """The indices along dimension `dim` of ours that a piece covers, and the hub's at the same elements."""
    axes = [axis for axis in piece.axes if axis.dims[NATIVE] == dim]
    hub_dims = {axis.dims[HUB] for axis in axes}
    if len(hub_dims) != 1:
        raise ValueError(f"{piece.names[HUB]}: dimension {dim} of {piece.names[NATIVE]} lies along several of its own")
    (hub_dim,) = hub_dims
    indices = []
    for side, at in ((HUB, hub_dim), (NATIVE, dim)):
        steps = [range(0, axis.size * axis.strides[side], axis.strides[side]) for axis in axes]
        indices.append(torch.tensor([piece.offsets[side][at] + sum(step) for step in product(*steps)]))
    return indices[HUB], indices[NATIVE]


def hub_modules(layout: Layout, linears: Collection[str]) -> list[HubModule]:
    """The modules of transformers' model that hold the weights of these linear layers of ours.

    Raises:
        ValueError: a weight is laid out in a way that no low-rank update of a linear module can follow.
    """
    modules = []
    for key, pieces in layout.pieces.items():
        used = [piece for piece in pieces if piece.names[NATIVE].removesuffix(WEIGHT) in linears]
        used = [piece for piece in used if piece.names[NATIVE].endswith(WEIGHT)]
        if not used:
            continue
        if len(layout.shapes[key]) != 2 or not key.endswith(WEIGHT):
            raise ValueError(
                f"targets: {used[0].names[NATIVE]} is part of the hub tensor {key!r}, which is no weight of a linear "
                "module, so peft has no adapter for it; leave it out of the targets"
            )
        along_rows = {axis.dims[HUB] for axis in used[0].axes if axis.dims[NATIVE] == 0}
        transposed = along_rows == {1}
        shape = layout.shapes[key]
        outputs, inputs = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
        blocks = tuple(
            Block(piece.names[NATIVE].removesuffix(WEIGHT), _indices(piece, 0), _indices(piece, 1)) for piece in used
        )
        name = layout.written[key].removesuffix(WEIGHT)
        modules.append(HubModule(name, key, outputs, inputs, transposed, blocks))
    return modules


def to_hub(module: HubModule, updates: Mapping[str, LowRankUpdate]) -> LowRankUpdate:
    """The update of a hub module from those of our layers, in their order; of DoRA all of them (check_dora)."""
    parts = [(block, updates[block.native]) for block in module.blocks if block.native in updates]
    assert parts[0][1].magnitude is None or _has_whole_rows(module, [block for block, _ in parts])
    return _join(parts, HUB, module.outputs, module.inputs)


def check_dora(layout: Layout, linears: Collection[str]) -> None:
    """Raise ValueError for linear layers of ours that are some of a hub module's rows, which DoRA normalises whole."""
    for module in hub_modules(layout, linears):
        if not _has_whole_rows(module, module.blocks):
            names = sorted(name.removesuffix(WEIGHT) for name in layout.natives(module.key))
            raise ValueError(
                f"targets: DoRA of transformers' {module.name} normalises whole rows of it, so it takes all of "
                f"{', '.join(names)}; target all of them, or leave use_dora out"
            )


def _has_whole_rows(module: HubModule, blocks: Collection[Block]) -> bool:
    """Whether the blocks are all of the module."""
    covered = sum(len(block.rows[HUB]) for block in blocks)
    return covered == module.outputs and all(len(block.cols[HUB]) == module.inputs for block in blocks)


def to_native(modules: Iterable[HubModule], read: Callable[[HubModule], LowRankUpdate]) -> dict[str, LowRankUpdate]:
    """The updates of our layers from those of hub modules: {our layer: update}; layers that nothing updates are left
    out."""
    parts_of: dict[str, list[tuple[Block, LowRankUpdate]]] = {}
    for module in modules:
        update = read(module)
        columns = _columns(module, update)
        for block, own in zip(module.blocks, columns, strict=True):
            if len(own):
                part = LowRankUpdate(update.a[own], update.b[:, own], update.scale, update.magnitude)
                parts_of.setdefault(block.native, []).append((block, part))
    return {
        native: _join(
            parts,
            NATIVE,
            outputs=1 + max(int(block.rows[NATIVE].max()) for block, _ in parts),
            inputs=1 + max(int(block.cols[NATIVE].max()) for block, _ in parts),
        )
        for native, parts in parts_of.items()
    }


def _columns(module: HubModule, update: LowRankUpdate) -> list[Tensor]:
    """Which columns of B each block takes: all of them, or its own where B is block-diagonal; of DoRA each takes some,
    as a magnitude changes a block without an update, too."""
    b = update.b
    all_columns = torch.arange(b.shape[1])
    shared = [all_columns] * len(module.blocks)
    nonzero = [(b[block.rows[HUB]] != 0).any(0).nonzero().flatten() for block in module.blocks]
    updated = [len(own) > 0 for own in nonzero]
    there = [changes or update.magnitude is not None for changes in updated]
    if len(module.blocks) == 1 or not any(updated) or b.shape[1] % sum(there):
        return shared
    # Blocks of one size each, in order; a column that is zero everywhere may belong to any.
    size, start, columns = b.shape[1] // sum(there), 0, []
    for own, is_there in zip(nonzero, there, strict=True):
        if not is_there:
            columns.append(all_columns[:0])
            continue
        if len(own) and (int(own[0]) < start or int(own[-1]) >= start + size):
            return shared
        columns.append(all_columns[start : start + size])
        start += size
    return columns


def _join(parts: list[tuple[Block, LowRankUpdate]], side: int, outputs: int, inputs: int) -> LowRankUpdate:
    """One update (outputs, inputs) on `side` of several blocks' updates on the other: their A one below the other,
    and their columns of B beside one another, each at its block's rows."""
    other = 1 - side
    scale, like = parts[0][1].scale, parts[0][1].a
    rank = sum(update.rank for _, update in parts)
    a, b = like.new_zeros(rank, inputs), like.new_zeros(outputs, rank)
    magnitude = None if parts[0][1].magnitude is None else like.new_zeros(outputs)
    start = 0
    for block, update in parts:
        at = torch.arange(start, start + update.rank)
        a[at[:, None], block.cols[side]] = update.a[:, block.cols[other]]
        factor = update.scale / scale
        rows = update.b[block.rows[other]]
        b[block.rows[side][:, None], at] = rows if factor == 1 else rows * factor
        if magnitude is not None and update.magnitude is not None:
            magnitude[block.rows[side]] = update.magnitude[block.rows[other]]
        start += update.rank
    return LowRankUpdate(a, b, scale, magnitude)
