"""Converting low-rank updates between Hugging Face's modules and ours, by the pieces of the conversion rules.

Our linear layers compute W x + s B A x. The hub tensor that holds W may also hold the weights of other layers (GPT-2's
c_attn, GPT-NeoX's interleaved query_key_value). Its update is then one block-diagonal adapter: the A of all parts are
stacked, and B has the columns of each part in the rows of that part. In the other direction, a part takes its rows of B
and the columns that are not zero there. Both directions are exact: elements are moved, not computed.
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

    a: (rank, in). b: (out, rank). magnitude: (out,), DoRA's norms of the rows; None: not DoRA.
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
    """The rows of a hub module that are one of our linear layers: row `rows[NATIVE][i]` is `rows[HUB][i]` there."""

    native: str
    rows: tuple[Tensor, Tensor]
    cols: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HubModule:
    """A linear module of transformers' model, with our layers of which it consists.

    Attributes:
        name: in the model of the task. key: of its weight in the layout.
        outputs, inputs: numbers of features. transposed: its weight is (in, out), as in Conv1D.
    """

    name: str
    key: str
    outputs: int
    inputs: int
    transposed: bool
    blocks: tuple[Block, ...]


def _indices(piece: Piece, dim: int) -> tuple[Tensor, Tensor]:
    """The indices along our dimension `dim` that a piece covers, and the hub's indices of the same elements."""
    axes = [axis for axis in piece.axes if axis.dims[NATIVE] == dim]
    hub_dims = {axis.dims[HUB] for axis in axes}
    if len(hub_dims) != 1:
        raise ValueError(f"{piece.names[HUB]}: dimension {dim} of {piece.names[NATIVE]} spans several of its own")
    (hub_dim,) = hub_dims
    indices = []
    for side, at in ((HUB, hub_dim), (NATIVE, dim)):
        steps = [range(0, axis.size * axis.strides[side], axis.strides[side]) for axis in axes]
        indices.append(torch.tensor([piece.offsets[side][at] + sum(step) for step in product(*steps)]))
    return indices[HUB], indices[NATIVE]


def hub_modules(layout: Layout, linears: Collection[str]) -> list[HubModule]:
    """The modules of transformers' model that hold the weights of our linear layers `linears`.

    Raises:
        ValueError: the layout of a weight does not allow a low-rank update of a linear module.
    """
    modules = []
    for key, pieces in layout.pieces.items():
        used = [piece for piece in pieces if piece.names[NATIVE].removesuffix(WEIGHT) in linears]
        used = [piece for piece in used if piece.names[NATIVE].endswith(WEIGHT)]
        if not used:
            continue
        if len(layout.shapes[key]) != 2 or not key.endswith(WEIGHT):
            raise ValueError(
                f"targets: {used[0].names[NATIVE]} is part of the hub tensor {key!r}, which is not the weight of a "
                "linear module, so peft has no adapter for it; leave it out of the targets"
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
    """The update of a hub module from those of our layers, in order; with DoRA, all must have one (check_dora)."""
    parts = [(block, updates[block.native]) for block in module.blocks if block.native in updates]
    assert parts[0][1].magnitude is None or _has_whole_rows(module, [block for block, _ in parts])
    return _join(parts, HUB, module.outputs, module.inputs)


def check_dora(layout: Layout, linears: Collection[str]) -> None:
    """Raise ValueError if our layers are only some of the rows of a hub module, which DoRA normalises as a whole."""
    for module in hub_modules(layout, linears):
        if not _has_whole_rows(module, module.blocks):
            names = sorted(name.removesuffix(WEIGHT) for name in layout.natives(module.key))
            raise ValueError(
                f"targets: DoRA normalises whole rows of transformers' {module.name}, which consists of "
                f"{', '.join(names)}; target all of them, or leave use_dora out"
            )


def _has_whole_rows(module: HubModule, blocks: Collection[Block]) -> bool:
    """Whether the blocks cover the whole module."""
    covered = sum(len(block.rows[HUB]) for block in blocks)
    return covered == module.outputs and all(len(block.cols[HUB]) == module.inputs for block in blocks)


def to_native(modules: Iterable[HubModule], read: Callable[[HubModule], LowRankUpdate]) -> dict[str, LowRankUpdate]:
    """The updates of our layers from those of hub modules: {our layer: update}, without layers that have none."""
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
    """The columns of B for each block: all of them, or only its own if B is block-diagonal. With DoRA every block gets
    some, because a magnitude changes even a block without an update."""
    b = update.b
    all_columns = torch.arange(b.shape[1])
    shared = [all_columns] * len(module.blocks)
    nonzero = [(b[block.rows[HUB]] != 0).any(0).nonzero().flatten() for block in module.blocks]
    updated = [len(own) > 0 for own in nonzero]
    there = [changes or update.magnitude is not None for changes in updated]
    if len(module.blocks) == 1 or not any(updated) or b.shape[1] % sum(there):
        return shared
    # Blocks of equal size, in order; an all-zero column may belong to any of them.
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
    """One update (outputs, inputs) on `side`, joined from those of several blocks on the other side: their A are
    stacked, and their columns of B are placed next to each other in the rows of their blocks."""
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
