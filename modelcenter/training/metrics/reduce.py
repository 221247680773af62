"""Counts of all ranks, on every rank.

The rule for all metrics: the shares of all ranks are put together, so of ranks that compute the same batch only one
adds it to its metrics. Nothing is reduced in place: a metric can go on counting after its `result`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import engine
from engine import runtime
from engine.collectives import gather_objects


def is_counted() -> bool:
    """Whether this rank's results are those of a batch: of ranks that compute it together, the first one's of the last
    stage."""
    return runtime.stage() == runtime.stages() - 1 and engine.rank() % runtime.model_ranks() == 0


def greatest(number: int) -> int:
    """The greatest of the ranks' numbers. Collective."""
    if engine.world_size() == 1:
        return number
    most = torch.tensor(number, device=runtime.message_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, a new one."""
    total = tensor.to(engine.device(), copy=True)
    if engine.world_size() > 1:
        dist.all_reduce(total)
    return total.to(tensor.device)


def sums(values: Sequence[float], dtype: torch.dtype = torch.int64) -> list[Any]:
    """The sums of these numbers over all ranks."""
    return sum_over_ranks(torch.tensor(values, dtype=dtype)).tolist()


def gather_lists(own: list[Any]) -> list[Any]:
    """The lists of all ranks, one after another, on every rank. For texts; numbers are summed instead."""
    return [item for of_rank in gather_objects(own) for item in of_rank]


def gather_rows(own: Tensor) -> Tensor:
    """The rows (n, ...) of all ranks, one after another, on every rank; ranks may have different numbers of them."""
    return torch.cat(gather_lists([own]))
