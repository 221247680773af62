"""The weight of a vocabulary head: whole, split by rows over tensor-parallel ranks, or with words of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine import runtime
from engine.parallel import functional
from engine.parallel.mesh import device_mesh
from engine.tensors import local_box
from engine.torch_compat import assert_on_device


@dataclass
class ExtendedVocabulary:
    """A vocabulary extended by words of the batch, as the `weight` of the functions of `head`, without a bias.

    words: (vocab_size, hidden_size), a weight as these functions take it. more: (n, hidden_size), for the classes from
    vocab_size on; whole, and the same on every rank that has a part of the words.
    """

    words: Tensor
    more: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.words.shape[0] + self.more.shape[0], self.words.shape[1]))


@dataclass
class VocabularyShard:
    """This rank's part of `vocab` classes that are split over a tensor-parallel group, beginning with class `first`."""

    group: Any
    vocab: int
    first: int

    @staticmethod
    def equal(classes: int) -> VocabularyShard | None:
        """The part of this rank if each rank of its tensor-parallel group has `classes`; None: it is alone."""
        if runtime.current().tp_size == 1:
            return None
        group = device_mesh()["tp"].get_group()
        return VocabularyShard(group, classes * group.size(), classes * group.rank())

    @property
    def most(self) -> int:
        """The number of classes of the rank that has the most."""
        return -(-self.vocab // self.group.size())

    def check(self, targets: Tensor) -> None:
        """Raise IndexError as cross_entropy does: a target that no rank has would silently have the logit 0."""
        if targets.device.type != "cpu":
            within = ((targets >= 0) & (targets < self.vocab)).all()
            assert_on_device(within, "target out of range of a vocabulary that tp_size splits")
        elif targets.numel():
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= self.vocab:
                wrong, last = low if low < 0 else high, self.vocab - 1
                raise IndexError(f"target is {wrong}, expected 0 to {last}, the classes of all ranks together")

    def columns(self, targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """(the columns (n, 1) of targets (n,) in this rank's logits, which have `columns`, or 0 if they are not there;
        (n, 1) whether they are)."""
        at = targets[:, None] - self.first
        here = (at >= 0) & (at < columns)
        return at.masked_fill(~here, 0), here

    def reduce(self, logits: Tensor, at: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logsumexp (n, 1), logit at the target (n, 1), mean (n,)) over the vocabulary, of fp32 logits (n, columns).

        at, here: as `columns` returns them.
        """
        top = logits.new_full((logits.shape[0], 1), -torch.inf)
        sums = logits.new_zeros(logits.shape[0], 3)
        if logits.shape[1]:
            top = logits.amax(1, keepdim=True)
        if top.numel():
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        if logits.shape[1]:
            sums[:, 0] = (logits - top).exp_().sum(1)
            sums[:, 1] = (logits.gather(1, at) * here).squeeze(1)
            sums[:, 2] = logits.sum(1)
        self.sum(sums)
        return sums[:, :1].log() + top, sums[:, 1:2], sums[:, 2] / self.vocab

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place."""
        if x.numel():
            dist.all_reduce(x, group=self.group)
        return x


def local_vocabulary(
    hidden: Tensor, weight: Tensor | ExtendedVocabulary, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
    """(this rank's rows of weight, of bias, which rows they are), differentiable; the last is None for plain tensors,
    which are whole.

    Raises ValueError if the weight is on the meta device, or split in another way.
    """
    if isinstance(weight, ExtendedVocabulary):
        assert bias is None
        words, _, shard = local_vocabulary(hidden, weight.words, None)
        more = weight.more
        if shard is not None:  # they come after the last rank's rows, and only that rank has their gradient
            more = functional.copy_to(more, shard.group)
            more = more if shard.group.rank() == shard.group.size() - 1 else more[:0]
            shard = replace(shard, vocab=weight.shape[0])
        return torch.cat((words, more)), None, shard
    if weight.is_meta and not hidden.is_meta:  # torch would multiply by uninitialised memory
        raise ValueError(
            "the weight of the vocabulary is on the meta device: a head that is tied to a table needs it after the "
            "table's own forward. Hooks that move weights of single modules away (accelerate's cpu_offload) must leave "
            "the table in place"
        )
    if not hasattr(weight, "to_local"):
        return weight, bias, None
    from torch.distributed.tensor import Shard

    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tuple(getattr(tensor, "placements", ())) != (Shard(0),):
            raise ValueError(
                f"the {name} of the vocabulary is not split by rows over one mesh dimension: give the table, the "
                "head's weight and its bias the style 'vocab' in tp_plan"
            )
    mesh = weight.device_mesh  # type: ignore[attr-defined]
    first = local_box(weight.shape, mesh, (Shard(0),))[1][0]
    shard = VocabularyShard(mesh.get_group(), weight.shape[0], first)
    return weight.to_local(), None if bias is None else bias.to_local(), shard  # type: ignore[attr-defined]
