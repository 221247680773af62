"""Which parameters the microbatches of a step use, on all ranks together."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from engine import runtime
from engine.names import clean_name
from engine.notes import LEAVES_UNUSED, stages_of
from engine.parallel.fsdp import reducing_unused, reshard


class Uses:
    """Which parameters the microbatches of a step use.

    Ranks need not use the same ones: an expert sees only some tokens, and a rank that is out of microbatches runs an
    empty one, which may skip a part of the model or use a part that no other microbatch does. All ranks must reduce the
    same gradients, so a rank reduces zeros for a parameter that it does not use. But a parameter that no rank uses must
    have no gradient, as in one process: weight decay and the optimizer's step count depend on that. Agreeing on these
    parameters takes a collective, which is skipped while no rank has left a parameter unused.

    Attributes:
        notes: whether uses of FSDP's parameters are to be noted.
        counted: whether uses count now: those by an empty microbatch do not.
        modules: FSDP's modules that take zeros, because the current backward reaches them; None: all.
        left: whether this rank has reduced zeros.
        order: 16 bits of a checksum of the order in which this rank has reduced the gradients of units.
    """

    def __init__(self, model: nn.Module, agrees: bool) -> None:
        self._model, self._agrees, self.counted, self.left, self._order = model, agrees, True, False, 0
        self.notes = runtime.world_size() > 1
        self.modules: set[nn.Module] | None = None if self.notes else set()
        self._noted, self._sharded = set[torch.Tensor](), set[torch.Tensor]()
        if self.notes:
            reshard(model)  # a forward without a backward may have left gathered parameters in the shards' places
        self._without = {p for p in model.parameters() if p.grad is None} if self.notes else set()

    @contextmanager
    def watch(self, roots: list[Any]) -> Iterator[None]:
        """Inside, note uses, and reduce zeros for what is not used."""
        with reducing_unused(roots, self) as self._sharded:
            # If no microbatch is empty, plain parameters need no notes: those that were used have a gradient.
            others = [p for p in self._model.parameters() if self._is_plain(p)] if self._agrees else []
            handles = [p.register_post_accumulate_grad_hook(self.note) for p in others]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def agreed(self, left: bool) -> set[torch.Tensor] | None:
        """The parameters that some rank has used; the gradients of all others are removed. Collective.

        Args:
            left: whether any rank has reduced zeros.

        Returns:
            None, without a collective, if no rank can have left a parameter unused.
        """
        LEAVES_UNUSED.set(self._model, bool(LEAVES_UNUSED.get(self._model)) or left)
        if not (self._agrees or left):
            return None
        reshard(self._model)
        named = [(clean_name(name), p) for name, p in self._model.named_parameters() if p.requires_grad]
        if not self._agrees:
            self._noted.update(p for _, p in named if self._is_plain(p) and p.grad is not None)
        stages = stages_of(self._model)  # which have different ones
        names = [name for name, _ in named] if stages is None else stages.parameters
        noted = {name for name, p in named if p in self._noted}
        unused = set(compress(names, map(operator.not_, of_any_rank([name in noted for name in names]))))
        for parameter in {p for name, p in named if name in unused}.intersection(self._without):
            parameter.grad = None
        return {p for name, p in named if name not in unused}

    def _is_plain(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad and parameter not in self._sharded

    def note(self, parameter: torch.Tensor) -> None:
        if self.counted:
            self._noted.add(parameter)

    def note_unused(self, shard: torch.Tensor) -> None:
        self.left = True

    def note_reduced(self, number: int) -> None:
        self._order = zlib.crc32(number.to_bytes(4, "little"), self._order)

    @property
    def order(self) -> int:
        return self._order & 0xFFFF


def of_any_rank(flags: list[bool]) -> list[bool]:
    """For each flag, whether any rank has set it; with one collective."""
    found = torch.tensor(flags, dtype=torch.int32, device=runtime.message_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]
