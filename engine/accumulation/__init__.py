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
    """Run forward and backward of this rank's microbatches as a part of one global batch.

    Afterwards the gradients are those of the mean over all supervised items of all microbatches on all ranks, however
    the global batch was cut. Works on plain and sharded models, in one process and on many ranks (collective there).
    Gradients are reduced once at levels 0 and 1, at each microbatch at levels 2 and 3; those of 16-bit parameters are
    added up in fp32 and rounded once. A model that is split into the stages of a pipeline (pp_size) runs them in the
    order of 1F1B; what ``forward`` does after its call of the model, and ``backward``, then happen on the last stage
    alone.

    Microbatches may use different parameters (experts, heads). But a unit (``units`` of ``engine.shard``) is gathered,
    and its gradients reduced, by all ranks together, so their microbatches must call the same units in the same order:
    leave out of ``units`` what only some of them call, and what only some of their losses depend on.

    Args:
        model: the module whose parameters get the gradients.
        microbatches: this rank's; ranks may have different numbers of them, also none.
        forward: ``forward(microbatch, totals)`` runs the model and returns a 0-d loss: this microbatch's sum of each
            loss term divided by ``totals[term]``, the number of items of the term in the global batch (at least 1).
        counts: ``counts(microbatch)`` is {term: number of items} (at most 16 terms).
        empty: makes a microbatch without items, with which a rank that has fewer microbatches takes part. Its loss
            must depend on the parameters (with gradients of zero); one that no other microbatch uses has no gradient.
        backward: called with the loss in place of ``loss.backward()``, such as ``OptimManager.backward``.

    Returns:
        The global mean, 0-d, detached, fp32, equal on all ranks.

    Raises:
        ValueError: on every rank, when ranks have different numbers of microbatches and one has no ``empty``, when
            there are none at all, when ranks count different terms, or when ranks of one pipeline, or of one batch,
            are given different ones; where ``forward`` or ``counts`` returns what it should not.
        RuntimeError: ``counts`` failed on another rank, a loss does not depend on the parameters, an exception ended
            an earlier step of a pipeline in the middle, or a rank did not take part within the timeout of
            ``init_distributed`` (it raised, was killed or hangs), which is named.
    """
    batches = list(microbatches)  # once: a loader shuffles, or masks, anew each time, and others would be counted
    if runtime.world_size() > 1 or sharded_roots(model):
        from engine.accumulation.over_ranks import accumulate_over_ranks  # a second to import: FSDP comes with it

        return accumulate_over_ranks(model, batches, forward, counts, empty, backward)
    *_, totals = agree_on_counts(batches, counts, empty, unsure=False)

    def loss_of(microbatch: Any, step: int) -> torch.Tensor:
        return checked_loss(forward(microbatch, totals), step)

    with accumulate_in_fp32(model, shown_parameters(model)):
        return run_in_turn(batches, loss_of, backward or torch.Tensor.backward)
