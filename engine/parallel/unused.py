"""Parameters that a backward outside ``engine.accumulate`` leaves unused, on some ranks or on all.

Ranks need not use the same ones: experts are for some tokens, heads for some tasks. All ranks must reduce the same, so
what one does not use it reduces as zeros; what none uses has no gradient, as in one process, and the ranks agree on
that when the backward has ended.
"""

from __future__ import annotations

import weakref
import zlib
from itertools import compress

import torch
import torch.distributed as dist
from torch import nn

from engine import runtime
from engine.parallel.fsdp import all_shards
from engine.torch_compat import run_after_backward, running_backward

ORDERS_DIFFER = (
    "the gradients of this step are wrong: ranks reached the model's units in different orders in backward, so "
    "gradients of one unit were added to those of another. Leave modules on whose outputs only some losses depend out "
    "of units= of engine.shard"
)


class Unused:
    """Those of one sharded model (``fsdp.Uses``)."""

    notes = True
    modules: set[nn.Module] | None = None  # all take zeros

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._backward = -1  # the last one that was told to agree
        self._zeros = set[torch.Tensor]()  # for these there were zeros, and no gradient before
        self._order = 0

    def agree_later(self) -> None:
        """Called in a backward, when FSDP has asked for its own call at the end: this one comes after that."""
        if self._backward != (running := running_backward()):
            self._backward, self._order = running, 0
            self._zeros.clear()
            run_after_backward(self._agree)

    def note(self, shard: torch.Tensor) -> None:
        self._zeros.discard(shard)  # a unit that runs twice is reduced twice

    def note_unused(self, shard: torch.Tensor) -> None:
        if shard.grad is None:
            self._zeros.add(shard)

    def note_reduced(self, number: int) -> None:
        self._order = zlib.crc32(number.to_bytes(4, "little"), self._order)

    def _agree(self) -> None:
        shards = [] if (model := self._model()) is None else list(all_shards(model))
        zeros = [shard in self._zeros for shard in shards]
        mine = [zlib.crc32(bytes(zeros)), self._order]
        bounds = torch.tensor([mine, [-n for n in mine]], device=runtime.message_device())
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        same, in_order = (bounds.sum(0) == 0).tolist()
        if not in_order:
            raise RuntimeError(ORDERS_DIFFER)
        if not same:
            unused = torch.tensor(zeros, dtype=torch.int32, device=bounds.device)
            dist.all_reduce(unused, op=dist.ReduceOp.MIN)
            zeros = list(map(bool, unused.tolist()))
        for shard in compress(shards, zeros):
            shard.grad = None
        self._zeros.clear()
