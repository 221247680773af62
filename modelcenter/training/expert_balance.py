"""The balance of a mixture's experts over a global batch, whose gradient does not depend on how the batch is cut.

The term multiplies how often the tokens choose an expert by its probabilities (models.mixture). The gradient of a
microbatch needs the choices of all. If each rank has one, the ranks add theirs in forward. If some have several, all
run once more before, without gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import engine
from engine.loss import IGNORE_INDEX
from engine.ops import dropout_rows
from modelcenter.layers.experts import BALANCE
from modelcenter.layers.host_copies import batch_to_device
from modelcenter.models.base import Model
from modelcenter.training.joint_loss import same_masks
from modelcenter.training.metrics import greatest, is_counted

if TYPE_CHECKING:
    from modelcenter.training.accumulation import TrainingLoss

Batch = Mapping[str, Any]
_UNREAD = {"loss": 1, BALANCE: 1}  # divisors of a loss that is not read: counting would make the host wait for a GPU


@contextmanager
def balanced(model: Model, batches: Sequence[Batch], loss: TrainingLoss) -> Iterator[Sequence[Batch]]:
    """Inside, the microbatches of a step balance the experts as one. Collective, if the loss has such a term.

    Args:
        batches: this rank's. loss: as in `accumulate`.

    Yields:
        The microbatches to run.
    """
    if not getattr(model, "balances_experts", False):
        yield batches
        return
    counted = not batches or BALANCE in loss.counts(batches[0])
    rounds = greatest(len(batches) if counted else 0)
    network: Any = model
    mine = [dict(batch) for batch in batches]
    with same_masks(model, mine) if rounds > 1 else nullcontext():
        if rounds > 1:
            total = _summed(_choices(network, mine, rounds, loss))
            network.expert_totals = lambda own: total
        elif rounds:
            network.expert_totals = _summed
        try:
            yield mine
        finally:
            network.expert_totals = None


def _summed(chosen: Tensor) -> Tensor:
    """The sum over all ranks of what each counted in its own microbatches."""
    if engine.world_size() == 1:
        return chosen
    total = chosen.clone() if is_counted() else torch.zeros_like(chosen)
    dist.all_reduce(total)
    return total


@torch.no_grad()
def _choices(model: Model, batches: Sequence[Batch], rounds: int, loss: TrainingLoss) -> Tensor:
    """(experts,) how often the tokens of this rank's microbatches choose each expert. Collective.

    rounds: number of microbatches on the rank that has most.
    """
    total: Any = 0
    for batch in [*batches, *(model.empty_batch() for _ in range(len(batches), rounds))]:
        unread = torch.full_like(batch["labels"], IGNORE_INDEX)  # so that no word is predicted
        given = batch_to_device({**batch, "labels": unread}, model.device)
        with dropout_rows(given.pop("row_ids", None)):
            total = total + model(**loss.inputs(given), loss_counts=_UNREAD)["expert_counts"]
    return total
