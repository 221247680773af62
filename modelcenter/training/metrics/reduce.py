"""Combining the counts of all ranks, on every rank.

The rule for all metrics: the shares of all ranks are combined, so only one of the ranks that compute the same batch
adds it to its metrics. Nothing is reduced in place, so that a metric can be updated further after its `result`.
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
    """Whether this rank adds a batch to its metrics: of the ranks that compute a batch together, only the first of the
    last stage does."""
    return runtime.stage() == runtime.stages() - 1 and engine.rank() % runtime.model_ranks() == 0


def greatest(number: int) -> int:
    """The largest of the ranks' numbers. Collective."""
    if engine.world_size() == 1:
        return number
    most = torch.tensor(number, device=runtime.message_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, as a new tensor."""
    total = tensor.to(engine.device(), copy=True)
    if engine.world_size() > 1:
        dist.all_reduce(total)
    return total.to(tensor.device)


def sums(values: Sequence[float], dtype: torch.dtype = torch.int64) -> list[Any]:
    """The sums of these numbers over all ranks."""
    return sum_over_ranks(torch.tensor(values, dtype=dtype)).tolist()


def gather_lists(own: list[Any]) -> list[Any]:
    """The concatenated lists of all ranks, on every rank. For texts; numbers are summed instead."""
    return [item for of_rank in gather_objects(own) for item in of_rank]


def gather_rows(own: Tensor) -> Tensor:
    """The concatenated rows (n, ...) of all ranks, on every rank; n may differ."""
    return torch.cat(gather_lists([own]))
