"""Parameters that a backward outside of ``engine.accumulate`` leaves unused, on some ranks or on all.

Ranks need not use the same parameters: an expert sees only some tokens, and a head serves only some tasks. All ranks
must reduce the same gradients, so a rank reduces zeros for what it does not use. A parameter that no rank uses must
have no gradient, as in one process; the ranks agree on these at the end of the backward.
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
    "gradients of one unit were added to those of another. Leave modules whose outputs only some losses use out of "
    "units= of engine.shard"
)


class Unused:
    """The unused parameters of one sharded model. Implements ``fsdp.Uses``."""

    notes = True
    modules: set[nn.Module] | None = None  # all modules reduce zeros

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._backward = -1  # the last backward that was told to agree
        self._zeros = set[torch.Tensor]()  # shards that got only zeros, and had no gradient before
        self._order = 0

    def agree_later(self) -> None:
        """Called in a backward, after FSDP has queued its own final callback, so that this one follows it."""
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
