"""The balance of a mixture's experts over a global batch, whose gradient does not depend on how the batch is cut.

The term multiplies how often the tokens choose an expert by its probabilities (models.mixture). The gradient of a
microbatch needs the choices of all. If each rank has one, the ranks add theirs in forward. If some have several, all
run once more before, without gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import engine
from engine.loss import IGNORE_INDEX
from engine.ops import dropout_rows
from modelcenter.layers.host_copies import batch_to_device
from modelcenter.models.base import Model
from modelcenter.training.joint_loss import same_masks
from modelcenter.training.metrics import greatest, is_counted

Batch = Mapping[str, Any]


@contextmanager
def balanced(
    model: Model, batches: Sequence[Batch], inputs: Callable[[Batch], dict[str, Any]]
) -> Iterator[Sequence[Batch]]:
    """Inside, the microbatches of a step balance the experts as one. Collective, if the loss has such a term.

    Args:
        batches: this rank's. inputs: the model's inputs, from a batch.

    Yields:
        The microbatches to run.
    """
    if not getattr(model, "balances_experts", False):
        yield batches
        return
    network: Any = model
    rounds = greatest(len(batches))
    mine = [dict(batch) for batch in batches]
    with same_masks(model, mine):
        if rounds > 1:
            total = _summed(_choices(network, mine, rounds, inputs))
            network.expert_totals = lambda own: total
        else:
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
def _choices(model: Model, batches: Sequence[Batch], rounds: int, inputs: Callable[[Batch], dict[str, Any]]) -> Tensor:
    """(experts,) how often the tokens of this rank's microbatches choose each expert. Collective.

    rounds: number of microbatches on the rank that has most.
    """
    total: Any = 0
    for batch in [*batches, *(model.empty_batch() for _ in range(len(batches), rounds))]:
        given = batch_to_device(batch, model.device)
        with dropout_rows(given.pop("row_ids", None)):
            given = inputs(given)
            unread = torch.full_like(given["labels"], IGNORE_INDEX)  # so that no word is predicted
            total = total + model(**{**given, "labels": unread})["expert_counts"]
    return total
