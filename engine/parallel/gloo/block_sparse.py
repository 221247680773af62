"""A reduce-scatter that does not send blocks of zeros, for the gradients of embedding tables over gloo.

A batch reads a few hundred rows of a table that may be most of a model, and the gradients of all others are zero. What
a rank sends of a part is which of its blocks hold anything, and these. Where that is most of them, as for a table that
is the vocabulary's head too, the part goes as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from engine.ops.layout import WORDS
from engine.parallel.gloo.point_to_point import wait_for
from engine.parallel.gloo.sharded_embedding import is_sharded_embedding

_BLOCK = 128  # elements
_SAMPLE = 64  # blocks that are looked at first
_MOST = 0.5  # of the blocks: above it a part goes whole
# So that no message of the user's own between two ranks is taken for one of these.
_WHICH_TAG, _BLOCKS_TAG = 0x7AB, 0x7AC


def has_gathered_embedding(unit: Any) -> bool:
    """Whether a unit gathers an embedding table, apart from those of units within it."""
    if isinstance(unit, nn.Embedding):
        return not is_sharded_embedding(unit)
    return any(has_gathered_embedding(child) for child in unit.children() if not isinstance(child, FSDPModule))


class BlockSparseParts:
    """A reduce-scatter under way: ``send[r]`` goes to each other rank r, and its part for this rank comes back."""

    def __init__(self, send: Sequence[torch.Tensor], group: Any) -> None:
        ranks, me = group.size(), group.rank()
        self._own, self._group = send[me], group
        blocks = send[me].numel() // _BLOCK
        self._which = {r: torch.empty(blocks, dtype=torch.bool) for r in range(ranks) if r != me}
        # What is to come first: a message waits at its sender until there is a place for it.
        self._asked: list[Any] = [
            dist.irecv(of, group=group, group_src=r, tag=_WHICH_TAG) for r, of in self._which.items()
        ]
        self._sent: list[tuple[Any, torch.Tensor]] = []
        for r in self._which:
            which = _filled(send[r])
            for tensor, tag in ((which, _WHICH_TAG), (_packed(send[r], which), _BLOCKS_TAG)):
                self._sent.append((dist.isend(tensor, group=group, group_dst=r, tag=tag), tensor))

    def add_into(self, output: torch.Tensor) -> None:
        """Wait for the parts and add them up, in the order of the ranks."""
        for work in self._asked:
            wait_for(work)
        coming: dict[int, tuple[Any, torch.Tensor]] = {}
        for r, which in self._which.items():
            size = int(which.sum()) * _BLOCK + len(output) % _BLOCK
            part = self._own.new_empty(size)
            coming[r] = dist.irecv(part, group=self._group, group_src=r, tag=_BLOCKS_TAG), part
        output.zero_()
        for r in range(self._group.size()):
            if r not in coming:
                output.add_(self._own)
                continue
            work, part = coming.pop(r)
            wait_for(work)
            _add_packed(output, part, self._which[r])
        for work, _ in self._sent:
            wait_for(work)


def _filled(part: torch.Tensor) -> torch.Tensor:
    """bool (blocks,): which blocks hold anything but zeros; all are True where most of a sample do."""
    blocks = _blocks(part)
    everything = torch.ones(len(blocks), dtype=torch.bool)
    if _holding(blocks[:: max(1, len(blocks) // _SAMPLE)]).float().mean() > _MOST:
        return everything
    which = _holding(blocks)
    return everything if which.float().mean() > _MOST else which


def _holding(blocks: torch.Tensor) -> torch.Tensor:
    # Of the bits as whole numbers: no number is too small to be seen, and it is the fastest that torch has.
    bits = blocks.view(WORDS[blocks.element_size()])
    return (bits.amax(1) != 0) | (bits.amin(1) != 0)


def _packed(part: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """The blocks of a part that hold anything but zeros, and the remainder behind the last block."""
    if bool(which.all()):
        return part
    blocks = _blocks(part)
    return torch.cat((blocks[which].flatten(), part[blocks.numel() :]))


def _add_packed(output: torch.Tensor, packed: torch.Tensor, which: torch.Tensor) -> None:
    if len(packed) == len(output):
        output.add_(packed)
        return
    blocks = _blocks(output)
    filled = which.nonzero()[:, 0]
    blocks.index_add_(0, filled, packed[: len(filled) * _BLOCK].view(-1, _BLOCK))
    output[blocks.numel() :] += packed[len(filled) * _BLOCK :]


def _blocks(part: torch.Tensor) -> torch.Tensor:
    return part[: part.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)
