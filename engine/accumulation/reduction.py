"""When FSDP reduces gradients over the ranks, and the reduction of those that FSDP does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from engine import runtime
from engine.accumulation.uses import of_any_rank
from engine.notes import zero_level
from engine.optim.checks import mark_gradients_averaged
from engine.parallel.fsdp import drop_pass
from engine.parallel.unused import ORDERS_DIFFER
from engine.tensors import is_shard

_BUCKET = 1 << 24  # elements of plain gradients that are reduced together


@contextmanager
def reduce_lazily(roots: list[Any]) -> Iterator[Callable[..., None]]:
    """Put off the reduction of gradients to the last backward of a step, as far as the ZeRO level allows.

    Yields ``set_last(last, modules=None, reduces=last)``, to be called before each backward: whether it is the last
    one, for all modules of the roots or for some of the only root. Afterwards FSDP reduces in every backward again, and
    after an exception gradients that were not reduced yet are dropped.
    """
    # Collected once: walking through the modules of a model takes as long as a small collective.
    inside = [[m for m in root.modules() if isinstance(m, FSDPModule)] for root in roots]

    def set_last(last: bool, modules: list[Any] | None = None, reduces: bool | None = None) -> None:
        reduces = last if reduces is None else reduces
        for root, own in zip(roots, inside, strict=True):
            level = zero_level(root)
            for module in own if modules is None else modules:
                module.set_requires_gradient_sync(reduces or level >= 2, recurse=False)
                # of the copies' shards, in hybrid sharding
                module.set_requires_all_reduce(reduces, recurse=False)
                # gathered parameters stay over microbatches
                module.set_reshard_after_backward(last or level == 3, recurse=False)

    try:
        yield set_last
    except BaseException:
        for root in roots:  # zero_grad does not reach these gradients: they would leak into the next global batch
            drop_pass(root)
        raise
    finally:
        set_last(True)


def sum_over_ranks(total: torch.Tensor, flag: bool, order: int) -> tuple[torch.Tensor, bool]:
    """``total`` summed over the ranks, and whether any rank has set ``flag``. Waits for a GPU only if the hosts cannot
    exchange numbers by themselves.

    Raises RuntimeError if ``order``, a 16-bit number, is not the same on all ranks.
    """
    # The ranks are counted, too: under engine.testing.fake_ranks a "sum" is what this rank alone has.
    numbers = torch.tensor([1, flag, order, order * order], dtype=torch.float64, device=runtime.message_device())
    if total.device == numbers.device:  # with one collective
        together = torch.cat([total.double().view(1), numbers])
        dist.all_reduce(together)
        total, numbers = together[0].float(), together[1:]
    else:
        dist.all_reduce(total)
        dist.all_reduce(numbers)
    ranks, flags, orders, squares = map(int, numbers.tolist())
    if ranks * squares != orders * orders:
        raise RuntimeError(ORDERS_DIFFER)
    return total, flags > 0


@torch.no_grad()
def average_plain_gradients(model: nn.Module, used: set[torch.Tensor] | None) -> None:
    """Average, over all ranks, the gradients of parameters that are not sharded.

    Args:
        used: the parameters that some rank has used; None: not known.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and not is_shard(p)]
    if not parameters:
        return
    mark_gradients_averaged(parameters)
    if used is None:
        used = set(compress(parameters, of_any_rank([p.grad is not None for p in parameters])))
    buckets: dict[torch.dtype, list[list[torch.Tensor]]] = {}
    for parameter in (p for p in parameters if p in used):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        same = buckets.setdefault(parameter.grad.dtype, [[]])
        if sum(g.numel() for g in same[-1]) + parameter.grad.numel() > _BUCKET:
            same.append([])
        same[-1].append(parameter.grad)
    for bucket in (b for same in buckets.values() for b in same if b):
        wide = torch.promote_types(bucket[0].dtype, torch.float32)
        flat = torch.cat([g.reshape(-1).to(wide) for g in bucket])
        dist.all_reduce(flat)
        flat /= runtime.world_size()
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
