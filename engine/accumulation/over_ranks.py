"""``engine.accumulate`` of a sharded model, and of any on several ranks."""

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
from engine.parallel.pipeline.execution import Reached, pipeline_of
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
        return checked_loss(forward(microbatch, totals), step)

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
    parameters = shown_parameters(model)
    averaged_here, in_fp32 = left_to_caller(parameters), accumulate_in_fp32(model, parameters)
    with in_fp32, reduce_lazily(roots) as set_last, uses.watch(roots), averaged_here:
        if pipeline is not None:
            total = pipeline.train(model, padded, loss_of, run_backward, before_backward)
        else:
            total = run_in_turn(_padded(batches, needed, empty), loss_of, run_backward, before_backward)
    if pipeline is not None:
        pipeline.sum_shared_gradients(model, held)
    if runtime.world_size() > 1:
        total, left = sum_over_ranks(total, uses.left, uses.order if pipeline is None else 0)
        average_plain_gradients(model, uses.agreed(left))
        total /= runtime.model_ranks()  # which all have the loss of their one batch
    return total


def _padded(microbatches: Sequence[Any], needed: int, empty: Callable[[], Any] | None) -> Iterator[Any]:
    yield from microbatches
    for _ in range(len(microbatches), needed):
        assert empty is not None
        yield empty()
