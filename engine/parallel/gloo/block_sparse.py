"""A reduce-scatter that does not send blocks of zeros, for the gradients of embedding tables over gloo.

A batch reads a few hundred rows of a table that may be most of a model, and the gradients of all others are zero. For
each part, a rank sends which of its blocks are not zero, and these blocks. If most are not zero, as for a table that is
also the vocabulary's head, it sends the part as it is.
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
_SAMPLE = 64  # blocks that are examined first
_MOST = 0.5  # if a larger share of the blocks is not zero, the part is sent whole
# Tags that keep these messages apart from the user's own messages between two ranks.
_WHICH_TAG, _BLOCKS_TAG = 0x7AB, 0x7AC


def has_gathered_embedding(unit: Any) -> bool:
    """Whether a unit gathers an embedding table, apart from those of units within it."""
    if isinstance(unit, nn.Embedding):
        return not is_sharded_embedding(unit)
    return any(has_gathered_embedding(child) for child in unit.children() if not isinstance(child, FSDPModule))


class BlockSparseParts:
    """A reduce-scatter in progress: ``send[r]`` goes to each other rank r, and r's part for this rank arrives."""

    def __init__(self, send: Sequence[torch.Tensor], group: Any) -> None:
        ranks, me = group.size(), group.rank()
        self._own, self._group = send[me], group
        blocks = send[me].numel() // _BLOCK
        self._which = {r: torch.empty(blocks, dtype=torch.bool) for r in range(ranks) if r != me}
        # Receive before sending, because a message waits at its sender until the receiver has a buffer for it.
        self._asked: list[Any] = [
            dist.irecv(of, group=group, group_src=r, tag=_WHICH_TAG) for r, of in self._which.items()
        ]
        self._sent: list[tuple[Any, torch.Tensor]] = []
        for r in self._which:
            which = _filled(send[r])
            for tensor, tag in ((which, _WHICH_TAG), (_packed(send[r], which), _BLOCKS_TAG)):
                self._sent.append((dist.isend(tensor, group=group, group_dst=r, tag=tag), tensor))

    def add_into(self, output: torch.Tensor) -> None:
        """Wait for the parts and add them up in rank order."""
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
    """bool (blocks,): which blocks are not zero; all True if that holds for most of a sample."""
    blocks = _blocks(part)
    everything = torch.ones(len(blocks), dtype=torch.bool)
    if _holding(blocks[:: max(1, len(blocks) // _SAMPLE)]).float().mean() > _MOST:
        return everything
    which = _holding(blocks)
    return everything if which.float().mean() > _MOST else which


def _holding(blocks: torch.Tensor) -> torch.Tensor:
    # Compares the bits as integers, which sees the smallest numbers and is the fastest way in torch.
    bits = blocks.view(WORDS[blocks.element_size()])
    return (bits.amax(1) != 0) | (bits.amin(1) != 0)


def _packed(part: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """The blocks of a part that are not zero, followed by the remainder after the last whole block."""
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
