"""What all metrics have in common: counts of this rank, and their sums over the ranks."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import engine

# Metrics of which less is better; of all others more is.
SMALLER_IS_BETTER = frozenset({"loss", "perplexity", "mse"})


class Score(Protocol):
    """What is asked of all metrics, once, on every rank. How they are fed is between them and their task."""

    main: str  # the metric by which runs are compared; higher is better, but for SMALLER_IS_BETTER

    def result(self) -> dict[str, float | None]: ...


class Metrics(Score, Protocol):
    """Metrics of logits, batch by batch."""

    def update(self, logits: Tensor, targets: Tensor) -> None: ...


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    if engine.world_size() > 1:
        home = tensor.device
        moved = tensor.to(engine.device())
        dist.all_reduce(moved)
        tensor.copy_(moved.to(home))
    return tensor


def gather_lists(own: list[Any]) -> list[Any]:
    """The lists of all ranks, one after another, on every rank. For texts; numbers are summed instead."""
    if engine.world_size() == 1:
        return own
    every: list[Any] = [None] * engine.world_size()
    dist.all_gather_object(every, own)
    return [item for part in every for item in part]


def ratio(part: float, whole: float) -> float:
    """part / whole, and 0 where there is nothing."""
    return part / whole if whole else 0.0


def sums(values: list[int], dtype: torch.dtype = torch.int64) -> list[Any]:
    """The sums of these numbers over all ranks."""
    return sum_over_ranks(torch.tensor(values, dtype=dtype)).tolist()
