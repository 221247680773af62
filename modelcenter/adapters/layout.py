"""Low-rank updates in Hugging Face's modules and in ours, by the pieces of the conversion rules.

A linear layer of ours computes W x + s B A x. The hub's tensor that holds W may hold other layers' weights beside it
(GPT-2's c_attn, GPT-NeoX's interleaved query_key_value). Its update is then one block-diagonal adapter: the A of all
parts one below the other, and a B that has each part's columns at that part's rows. The other way round a part takes
its rows of B and the columns that are not zero there. Both are exact: elements move, none is computed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from modelcenter.convert.pieces import HUB, NATIVE, Piece
from modelcenter.convert.rules import Layout

WEIGHT = ".weight"


@dataclass
class Update:
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


@dataclass
class Block:
    """Where a linear layer of ours lies in a hub module: its row `rows[NATIVE][i]` is `rows[HUB][i]` there."""

    native: str
    rows: tuple[Tensor, Tensor]
    cols: tuple[Tensor, Tensor]


@dataclass
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
    blocks: list[Block] = field(default_factory=list)


def _indices(piece: Piece, dim: int) -> tuple[Tensor, Tensor]:
    """The indices along dimension `dim` of ours that a piece covers, and the hub's at the same elements."""
    axes = [axis for axis in piece.axes if axis.dims[NATIVE] == dim]
    hub_dims = {axis.dims[HUB] for axis in axes}
    if len(hub_dims) != 1:
        raise ValueError(f"{piece.names[HUB]}: dimension {dim} of {piece.names[NATIVE]} lies along several of its own")
    (hub_dim,) = hub_dims
    found = []
    for side, at in ((HUB, hub_dim), (NATIVE, dim)):
        steps = [range(0, axis.size * axis.strides[side], axis.strides[side]) for axis in axes]
        found.append(torch.tensor([piece.offsets[side][at] + sum(step) for step in product(*steps)]))
    return found[HUB], found[NATIVE]


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
        module = HubModule(layout.written[key].removesuffix(WEIGHT), key, outputs, inputs, transposed)
        for piece in used:
            block = Block(piece.names[NATIVE].removesuffix(WEIGHT), _indices(piece, 0), _indices(piece, 1))
            module.blocks.append(block)
        modules.append(module)
    return modules


def to_hub(module: HubModule, updates: Mapping[str, Update]) -> Update:
    """The update of a hub module from those of our layers, in their order.

    Raises:
        ValueError: DoRA of a part of the module's rows.
    """
    parts = [(block, updates[block.native]) for block in module.blocks if block.native in updates]
    covered = sum(len(block.rows[HUB]) for block, _ in parts)
    narrow = any(len(block.cols[HUB]) != module.inputs for block, _ in parts)
    if parts[0][1].magnitude is not None and (covered != module.outputs or narrow):
        names = ", ".join(sorted({piece.native for piece in module.blocks}))
        raise ValueError(
            f"targets: DoRA of transformers' {module.name} normalises whole rows of it, so it takes all of {names}; "
            "target all of them, or leave use_dora out"
        )
    return _joined(parts, HUB, module.outputs, module.inputs)


def to_native(modules: Iterable[HubModule], read: Callable[[HubModule], Update]) -> dict[str, Update]:
    """The updates of our layers from those of hub modules: {our layer: update}; layers that nothing updates are left
    out."""
    found: dict[str, list[tuple[Block, Update]]] = {}
    for module in modules:
        update = read(module)
        columns = _columns(module, update.b)
        for block, own in zip(module.blocks, columns, strict=True):
            if len(own):
                part = Update(update.a[own], update.b[:, own], update.scale, update.magnitude)
                found.setdefault(block.native, []).append((block, part))
    return {
        native: _joined(
            parts,
            NATIVE,
            outputs=1 + max(int(block.rows[NATIVE].max()) for block, _ in parts),
            inputs=1 + max(int(block.cols[NATIVE].max()) for block, _ in parts),
        )
        for native, parts in found.items()
    }


def _columns(module: HubModule, b: Tensor) -> list[Tensor]:
    """Which columns of B each block takes: all of them, or its own where B is block-diagonal."""
    everything = torch.arange(b.shape[1])
    used = [(b[block.rows[HUB]] != 0).any(0).nonzero().flatten() for block in module.blocks]
    taken = [own for own in used if len(own)]
    if len(module.blocks) == 1 or not taken or b.shape[1] % len(taken):
        return [everything] * len(module.blocks)
    # Blocks of one size each, in order; a column that is zero everywhere may belong to any.
    size, turn, columns = b.shape[1] // len(taken), 0, []
    for own in used:
        place = everything[turn * size : (turn + 1) * size] if len(own) else everything[:0]
        if len(own) and (int(own[0]) < int(place[0]) or int(own[-1]) > int(place[-1])):
            return [everything] * len(module.blocks)
        columns.append(place)
        turn += bool(len(own))
    return columns


def _joined(parts: list[tuple[Block, Update]], to: int, outputs: int, inputs: int) -> Update:
    """One update (outputs, inputs) on side `to` of several blocks' updates on the other: their A one below the other,
    and their columns of B beside one another, each at its block's rows."""
    other = NATIVE if to == HUB else HUB
    scale, like = parts[0][1].scale, parts[0][1].a
    rank = sum(update.rank for _, update in parts)
    a, b = like.new_zeros(rank, inputs), like.new_zeros(outputs, rank)
    magnitude = None if parts[0][1].magnitude is None else like.new_zeros(outputs)
    start = 0
    for block, update in parts:
        at = torch.arange(start, start + update.rank)
        a[at[:, None], block.cols[to]] = update.a[:, block.cols[other]]
        factor = update.scale / scale
        rows = update.b[block.rows[other]]
        b[block.rows[to][:, None], at] = rows if factor == 1 else rows * factor
        if magnitude is not None and update.magnitude is not None:
            magnitude[block.rows[to]] = update.magnitude[block.rows[other]]
        start += update.rank
    return Update(a, b, scale, magnitude)


def module_names(layout: Layout) -> list[str]:
    """All modules of transformers' model that hold a tensor of the layout."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in layout.written.values()))


def short_names(chosen: Collection[str], everything: Iterable[str]) -> list[str]:
    """Suffixes of module names that stand for the chosen modules and for no other, as short as they can be."""
    ending: dict[str, set[str]] = {}
    for name in everything:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            ending.setdefault(".".join(parts[-k:]), set()).add(name)
    wanted = set(chosen)
    found: dict[str, None] = {}
    for name in chosen:
        parts = name.split(".")
        suffixes = (".".join(parts[-k:]) for k in range(1, len(parts) + 1))
        found[next((s for s in suffixes if ending.get(s, {name}) <= wanted), name)] = None
    return list(found)


def patterns(values: Mapping[str, Any], everything: Iterable[str]) -> dict[str, Any]:
    """{short name: value} for peft's rank_pattern and alpha_pattern, from {module: value}."""
    by_value: dict[Any, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault(value, []).append(name)
    names = list(everything)
    return {short: value for value, found in by_value.items() for short in short_names(found, names)}
