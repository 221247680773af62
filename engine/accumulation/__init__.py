"""Forward and backward of a list of microbatches as one global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from engine import runtime
from engine.accumulation.microbatches import checked_loss, run_in_turn, shown_parameters
from engine.accumulation.shares import agree_on_counts
from engine.lockstep import watched
from engine.parallel.fp32_accumulation import accumulate_in_fp32
from engine.shards import sharded_roots

__all__ = ["accumulate"]


@watched("engine.accumulate")
def accumulate(
    model: nn.Module,
    microbatches: Iterable[Any],
    forward: Callable[[Any, Mapping[str, int]], torch.Tensor],
    counts: Callable[[Any], Mapping[str, int]],
    empty: Callable[[], Any] | None = None,
    backward: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Run forward and backward of this rank's microbatches as part of one global batch.

    Afterwards the gradients are those of the mean over all supervised items of all microbatches on all ranks, however
    the global batch was cut. Works on plain and sharded models, in one process and on many ranks (there it is
    collective). Gradients are reduced once a step at levels 0 and 1, and once a microbatch at levels 2 and 3; those of
    16-bit parameters are summed in fp32 and rounded once. A model that is split into pipeline stages (pp_size) runs the
    microbatches in 1F1B order; ``backward``, and whatever ``forward`` does after calling the model, then run on the
    last stage only.

    Microbatches may use different parameters (experts, heads). But all ranks together gather a unit (``units`` of
    ``engine.shard``) and reduce its gradients, so their microbatches must call the same units in the same order: leave
    out of ``units`` whatever only some microbatches call, or only some of their losses depend on.

    Args:
        model: the module whose parameters get the gradients.
        microbatches: this rank's; ranks may have different numbers of them, or none.
        forward: ``forward(microbatch, totals)`` runs the model and returns a 0-d loss: this microbatch's sum of each
            loss term divided by ``totals[term]``, the number of items of the term in the global batch (at least 1).
        counts: ``counts(microbatch)`` is {term: number of items} (at most 16 terms).
        empty: makes a microbatch without items, for ranks that have fewer microbatches than others. Its loss must
            depend on the parameters, with gradients of zero; a parameter that no other microbatch uses gets no
            gradient.
        backward: called with the loss instead of ``loss.backward()``, such as ``OptimManager.backward``.

    Returns:
        The global mean, 0-d, detached, fp32, equal on all ranks.

    Raises:
        ValueError: on every rank: ranks have different numbers of microbatches and a short one has no ``empty``; there
            are no microbatches at all; ranks count different terms; ranks that compute one batch together were given
            different ones. Also if ``forward`` or ``counts`` returns something invalid.
        RuntimeError: ``counts`` failed on another rank; a loss does not depend on the parameters; an exception
            interrupted an earlier step of a pipeline; or a rank, which is named, did not take part within the timeout
            of ``init_distributed`` because it raised, was killed or hangs.
    """
    batches = list(microbatches)  # once, since a loader may shuffle or mask anew each time: others would be counted
    if runtime.world_size() > 1 or sharded_roots(model):
        from engine.accumulation.over_ranks import accumulate_over_ranks  # imports FSDP, which takes a second

        return accumulate_over_ranks(model, batches, forward, counts, empty, backward)
    totals = agree_on_counts(batches, counts, empty, unsure=False).totals

    def loss_of(microbatch: Any, step: int) -> torch.Tensor:
        return checked_loss(forward(microbatch, totals), step)

    with accumulate_in_fp32(model, shown_parameters(model)):
        return run_in_turn(batches, loss_of, backward or torch.Tensor.backward)
