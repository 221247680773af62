"""Forward and backward of a list of microbatches as one global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from engine import runtime
from engine.accumulation.reduction import average_plain_gradients, reduce_lazily, sum_over_ranks
from engine.accumulation.shares import agree_on_counts
from engine.accumulation.uses import Uses
from engine.lockstep import watched
from engine.parallel.fp32_accumulation import accumulate_in_fp32
from engine.parallel.pipeline.execution import Reached, pipeline_of
from engine.parallel.scalars import left_to_caller
from engine.parallel.shard import sharded_roots
from engine.registry import LEAVES_UNUSED

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

    Microbatches may use different parameters (experts, heads). But all ranks together gather a unit (``units`` of
    ``engine.shard``) and reduce its gradients, so their microbatches call the same units in the same order: what only
    some call, or on which only some of their losses depend, is left out of ``units``.

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
    size = runtime.data_size()
    pipeline = pipeline_of(model)
    if pipeline is None and runtime.current().pp_size > 1:
        raise ValueError(
            f"pp_size is {runtime.current().pp_size}, but this {type(model).__name__} is not split into stages: call "
            "engine.shard(model) first (a PipelineTransformerBlockList trains in a loop of its own, by loss.backward())"
        )
    unsure = LEAVES_UNUSED.get(model) is not False
    steps, fewest, unsure, totals = agree_on_counts(batches, counts, empty, unsure)
    needed = steps if pipeline is None else pipeline.round_up(steps)
    if needed > steps and empty is None:
        raise ValueError(
            f"the interleaved schedule (pp_chunks above 1) runs a multiple of pp_size={runtime.current().pp_size} "
            f"microbatches, there are {steps}: pass empty= so that they can be filled up"
        )
    roots = sharded_roots(model)
    uses = Uses(model, agrees=fewest < needed or unsure)

    def loss_of(microbatch: Any, step: int) -> torch.Tensor:
        return _checked_loss(forward(microbatch, totals), step)

    def run_backward(loss: torch.Tensor) -> None:
        # Reduction averages over the data; the loss is a part of a global mean already.
        (backward or torch.Tensor.backward)(loss * size if size > 1 else loss)

    def before_backward(step: int, reached: Reached | None = None) -> None:
        uses.counted, last = step < len(batches), step == needed - 1
        if reached is None:
            set_last(last)
            return
        uses.modules = set[Any](reached.units + (reached.root if reached.uses_root else []))
        set_last(last, reached.units)
        # Parts of a stage share the root, and those that do not use it leave it alone.
        set_last(last, reached.root, reduces=last and reached.uses_root)

    if pipeline is not None:
        padded = list(_padded(batches, needed, empty))
        pipeline.check_same(padded)
        held = pipeline.take_shared_gradients(model)
    parameters = _parameters(model)
    averaged_here, in_fp32 = left_to_caller(parameters), accumulate_in_fp32(model, parameters)
    with in_fp32, reduce_lazily(roots) as set_last, uses.watch(roots), averaged_here:
        if pipeline is not None:
            total = pipeline.train(model, padded, loss_of, run_backward, before_backward)
        else:
            total = torch.zeros(())
            for step, microbatch in enumerate(_padded(batches, needed, empty)):
                before_backward(step)
                loss = loss_of(microbatch, step)
                part = loss.detach().to(torch.float32, copy=True)
                total = total + part if step else part  # to copy the zero to a GPU would be to wait for it
                run_backward(loss)
    if pipeline is not None:
        pipeline.sum_shared_gradients(model, held)
    if runtime.world_size() > 1:
        total, left = sum_over_ranks(total, uses.left, uses.order if pipeline is None else 0)
        average_plain_gradients(model, uses.agreed(left))
        total /= runtime.model_ranks()  # which all have the loss of their one batch
    return total


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters as the model shows them, each once, in no order: for which torch has a generator in each module,
    and names."""
    found: dict[int, nn.Parameter] = {}
    left = [model]
    while left:
        module = left.pop()
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter
        if module._modules:
            left += [child for child in module._modules.values() if child is not None]
    return list(found.values())


def _checked_loss(loss: Any, step: int) -> torch.Tensor:
    """What ``forward`` has returned."""
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"forward returned {loss!r} as the loss of microbatch {step}, expected a 0-d tensor, which depends on the "
            "parameters"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            f"the loss of microbatch {step} on rank {runtime.rank()} does not depend on the parameters, so this rank "
            "cannot take part in the reduction of the gradients: a loss over no items must be a sum over nothing, not "
            "a constant"
        )
    return loss


def _padded(microbatches: Sequence[Any], needed: int, empty: Callable[[], Any] | None) -> Iterator[Any]:
    yield from microbatches
    for _ in range(len(microbatches), needed):
        assert empty is not None
        yield empty()
