"""``engine.accumulate`` for sharded models, and for any model on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from engine import runtime
from engine.accumulation.microbatches import checked_loss, run_in_turn, shown_parameters
from engine.accumulation.reduction import average_plain_gradients, reduce_lazily, sum_over_ranks
from engine.accumulation.shares import agree_on_counts
from engine.accumulation.uses import Uses
from engine.notes import LEAVES_UNUSED
from engine.parallel.fp32_accumulation import accumulate_in_fp32
from engine.parallel.pipeline.execution import Pipeline, Reached, pipeline_of
from engine.parallel.scalars import left_to_caller
from engine.shards import sharded_roots


def accumulate_over_ranks(
    model: nn.Module,
    batches: list[Any],
    forward: Callable[[Any, Mapping[str, int]], torch.Tensor],
    counts: Callable[[Any], Mapping[str, int]],
    empty: Callable[[], Any] | None,
    backward: Callable[[torch.Tensor], None] | None,
) -> torch.Tensor:
    """See ``engine.accumulate``. Collective."""
    pipeline = pipeline_of(model)
    _check_stages(model, pipeline)
    agreed = agree_on_counts(batches, counts, empty, unsure=LEAVES_UNUSED.get(model) is not False)
    needed = _number_to_run(agreed.most, pipeline, empty)
    uses = Uses(model, agrees=agreed.fewest < needed or agreed.unsure)
    size = runtime.data_size()

    def loss_of(microbatch: Any, step: int) -> torch.Tensor:
        return checked_loss(forward(microbatch, agreed.totals), step)

    def run_backward(loss: torch.Tensor) -> None:
        # FSDP averages gradients over the data-parallel ranks, but each loss is a part of a global mean already.
        (backward or torch.Tensor.backward)(loss * size if size > 1 else loss)

    def before_backward(step: int, reached: Reached | None = None) -> None:
        uses.counted = step < len(batches)
        _prepare_backward(uses, set_last, step == needed - 1, reached)

    padded = _padded(batches, needed, empty)
    if pipeline is not None:
        microbatches = list(padded)
        pipeline.check_same(microbatches)
        held = pipeline.take_shared_gradients(model)
    roots, parameters = sharded_roots(model), shown_parameters(model)
    averaged_here, in_fp32 = left_to_caller(parameters), accumulate_in_fp32(model, parameters)
    with in_fp32, reduce_lazily(roots) as set_last, uses.watch(roots), averaged_here:
        if pipeline is not None:
            total = pipeline.train(model, microbatches, loss_of, run_backward, before_backward)
        else:
            total = run_in_turn(padded, loss_of, run_backward, before_backward)
    if pipeline is not None:
        pipeline.sum_shared_gradients(model, held)
    if runtime.world_size() > 1:
        total, left = sum_over_ranks(total, uses.left, uses.order if pipeline is None else 0)
        average_plain_gradients(model, uses.agreed(left))
        total /= runtime.model_ranks()  # each of them has the loss of the batch that they compute together
    return total


def _check_stages(model: nn.Module, pipeline: Pipeline | None) -> None:
    pp_size = runtime.current().pp_size
    if pipeline is None and pp_size > 1:
        raise ValueError(
            f"pp_size is {pp_size}, but this {type(model).__name__} is not split into stages: call engine.shard(model) "
            "first (a PipelineTransformerBlockList is trained by loss.backward() instead)"
        )


def _number_to_run(most: int, pipeline: Pipeline | None, empty: Callable[[], Any] | None) -> int:
    """How many microbatches each rank runs: as many as the rank with the most, or what the schedule makes of that."""
    needed = most if pipeline is None else pipeline.round_up(most)
    if needed > most and empty is None:
        raise ValueError(
            f"the interleaved schedule (pp_chunks above 1) needs a multiple of pp_size={runtime.current().pp_size} "
            f"microbatches, got {most}: pass empty= to fill them up"
        )
    return needed


def _padded(microbatches: Sequence[Any], needed: int, empty: Callable[[], Any] | None) -> Iterator[Any]:
    yield from microbatches
    for _ in range(len(microbatches), needed):
        assert empty is not None
        yield empty()


def _prepare_backward(uses: Uses, set_last: Callable[..., None], last: bool, reached: Reached | None) -> None:
    """Tell FSDP what the coming backward reduces.

    Args:
        set_last: from ``reduce_lazily``. last: whether it is the last backward of the step.
        reached: the modules that this backward of a pipeline's stage reaches; None: the whole model.
    """
    if reached is None:
        set_last(last)
        return
    uses.modules = set[Any](reached.units + (reached.root if reached.uses_root else []))
    set_last(last, reached.units)
    # The parts of a stage share the root, and those that do not use it must not reduce its gradients.
    set_last(last, reached.root, reduces=last and reached.uses_root)
