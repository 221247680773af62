"""Losses over all items of a global batch together, such as contrastive ones, with gradients that do not depend on how
the batch is cut.

The gradient with respect to one item's output needs the outputs of all items. So if a rank has several microbatches,
all but one run twice (Gao et al. 2021, arXiv:2101.06983): first without gradients, for the outputs; then forward and
backward, with the gradient with respect to the outputs known. Dropout draws the same masks both times, by step, row and
position.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

import engine
from engine import runtime
from engine.collectives import from_rank_0
from engine.ops import dropout_key, dropout_rows
from engine.ops.dropout_masks import has_dropout_key
from engine.torch_compat import all_gather_flat
from modelcenter.layers.host_copies import batch_to_device
from modelcenter.models.base import Model
from modelcenter.training.metrics import greatest, is_counted

Batch = Mapping[str, Any]
_MICROBATCH = "microbatch"  # key of the number of a batch, in the second pass


@runtime_checkable
class JointLoss(Protocol):
    """A loss over all items of a global batch together. An item is a sequence of the model's input."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The keyword arguments of the model's forward, from a batch."""
        ...

    def counts(self, batch: Batch) -> Mapping[str, int]:
        """{"loss": how many of the things over which the loss is a mean are in the batch}."""
        ...

    def facts(self, batch: Batch) -> Tensor:
        """(n, k) fp64 on the host: what the loss needs to know about each item besides the model's output."""
        ...

    def outputs(self, out: Any) -> Tensor:
        """(n, width): the part of the model's output that the loss reads."""
        ...

    def share(self, outputs: Tensor, facts: Tensor, own: slice, gradient: bool = True) -> tuple[Tensor, Tensor]:
        """One rank's share of the loss of all items; the shares of all ranks add up to the loss.

        Args:
            outputs: (N, width) fp32. facts: (N, k) fp64, on the host. own: the items that the rank answers for.
            gradient: whether the gradient is needed; if False, it is not valid.

        Returns:
            The share, 0-d, and its gradient (N, width) with respect to all outputs.
        """
        ...


@dataclass(frozen=True)
class _Found:
    """The loss (0-d), and its gradients with respect to the outputs of this rank's microbatches."""

    value: Tensor
    gradients: Sequence[Tensor]


def accumulate_jointly(
    model: Model, microbatches: Iterable[Batch], loss: JointLoss, backward: Callable[[Tensor], None] | None = None
) -> Tensor:
    """As `accumulate`, for a loss over all items together. Collective."""
    batches = [dict(batch) for batch in microbatches]
    most = greatest(len(batches))
    # The first microbatch need not run twice: its backward runs when the outputs of the others are known.
    first = 0 if model.pipeline is not None else 1
    found: _Found | None = None
    held: list[Tensor] = []

    def join(outputs: Sequence[Tensor]) -> _Found:
        facts = [loss.facts(batch) for batch in batches]
        value, gradient = _joint(loss, _joined(outputs), _joined(facts))
        return _Found(value, gradient.split([len(part) for part in outputs]) if outputs else ())

    def forward(microbatch: Batch, totals: Mapping[str, int]) -> Tensor:
        nonlocal found
        number = microbatch.get(_MICROBATCH)  # None: an empty one, because this rank has fewer than others
        out = _run(model, loss, {name: value for name, value in microbatch.items() if name != _MICROBATCH})
        outputs, own = loss.outputs(out), loss.counts(microbatch)["loss"]
        if found is None:
            found = join([outputs.detach(), *held] if number is not None else [])
        gradient = torch.zeros_like(outputs) if number is None else found.gradients[number]
        return _WithGradient.apply(outputs, found.value * (own / totals["loss"]), gradient)

    with same_masks(model, batches) if most > first else nullcontext():
        held = _outputs(model, batches[first:], most - first, loss)
        if model.pipeline is not None:
            found = join(held)
        batches = [{**batch, _MICROBATCH: number} for number, batch in enumerate(batches)]
        return engine.accumulate(model, batches, forward, loss.counts, model.empty_batch, backward)


def _run(model: Model, loss: JointLoss, batch: Batch, call: Callable[[Any], Any] = lambda forward: forward()) -> Any:
    """The model's output for a batch."""
    given = batch_to_device(loss.inputs(batch), model.device)
    with dropout_rows(given.pop("row_ids", None)):
        return call(functools.partial(model, **given))


@torch.no_grad()
def _outputs(model: Model, batches: Sequence[Batch], rounds: int, loss: JointLoss) -> list[Tensor]:
    """The outputs that the loss reads, for these batches of this rank; in a pipeline, on the last stage. Collective.

    Args:
        rounds: number of batches on the rank that has most.
    """
    pipeline, outputs = model.pipeline, []
    padded = [*batches, *(model.empty_batch() for _ in range(len(batches), rounds))]
    if pipeline is not None:
        pipeline.check_same(padded)
    for batch in padded:
        out = _run(model, loss, batch) if pipeline is None else _run(model, loss, batch, pipeline.forward)
        if runtime.stage() == runtime.stages() - 1:
            outputs.append(loss.outputs(out))
        del out
    if pipeline is not None:
        pipeline.flush()
    return outputs[: len(batches)]


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([*parts]) if parts else None


def _joint(loss: JointLoss, own: Tensor | None, facts: Tensor | None) -> tuple[Tensor, Tensor]:
    """The loss over the items of all ranks, 0-d, and its gradient with respect to this rank's outputs. Collective.

    Args:
        own: (n, width) this rank's outputs; None: it has none. facts: (n, k) those of its items.
    """
    device = engine.device() if own is None else own.device
    if runtime.world_size() == 1:
        assert own is not None and facts is not None
        return loss.share(own.float(), facts, slice(0, len(own)))
    items = None if own is None or not is_counted() else (own.float(), facts)
    every, every_fact, starts = _gather(items, device)
    first = (runtime.stages() - 1) * (runtime.world_size() // runtime.stages())
    leader = first + runtime.data_rank() * runtime.model_ranks()  # the first rank that computes this rank's batch
    mine = slice(starts[leader], starts[leader + 1])
    value, gradient = loss.share(every, every_fact, mine)
    sums = torch.cat((gradient.flatten(), value.reshape(1).float()))
    if not is_counted():
        sums.zero_()
    dist.all_reduce(sums)
    return sums[-1], sums[:-1].view_as(gradient)[mine]


def _gather(items: tuple[Tensor, Tensor | None] | None, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """The outputs (N, width) and, on the host, the facts (N, k) of all ranks, and the index of each rank's first item,
    then N.

    Args:
        items: this rank's outputs and facts; None: it has none.
    """
    host, world = runtime.message_device(), runtime.world_size()
    shape = [0, 0, 0] if items is None or items[1] is None else [*items[0].shape, items[1].shape[1]]
    table = torch.empty(world, 3, dtype=torch.int64, device=host)
    all_gather_flat(table, torch.tensor(shape, dtype=torch.int64, device=host))
    shapes = table.tolist()
    most, width, k = (max(column) for column in zip(*shapes, strict=True))
    gathered = []
    for number, (size, dtype, place) in enumerate(((width, torch.float32, device), (k, torch.float64, host))):
        mine = torch.zeros(most, size, dtype=dtype, device=place)
        if items is not None and (held := items[number]) is not None:
            mine[: len(held)] = held.to(place)
        every = torch.empty(world, most, size, dtype=dtype, device=place)
        all_gather_flat(every, mine)
        gathered.append(torch.cat([every[rank, :n] for rank, (n, _, _) in enumerate(shapes)]))
    starts = [sum(n for n, _, _ in shapes[:rank]) for rank in range(world + 1)]
    return gathered[0], gathered[1].cpu(), starts


def same_masks(model: Model, batches: list[dict[str, Any]]) -> AbstractContextManager[Any]:
    """Inside, dropout draws the same masks each time a batch runs. Adds row ids to batches without."""
    if not model.training:
        return nullcontext()
    first = runtime.data_rank() << 20
    for batch in batches:
        if batch.get("row_ids") is None:
            cu = batch.get("cu_seqlens")
            rows = next(iter(batch.values())).shape[0] if cu is None else len(cu) - 1
            batch["row_ids"] = torch.arange(first, first + rows)
            first += rows
    return nullcontext() if has_dropout_key() else dropout_key(from_rank_0(int(torch.randint(1 << 62, ()))), 0)


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient with respect to the outputs is known. The gradient is multiplied by the loss scale before
    it is rounded, because with many items its elements are below the smallest number of fp16."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = outputs.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[0]).to(ctx.dtype), None, None
