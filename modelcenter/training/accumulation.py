"""Forward and backward of microbatches as one global batch, for models that follow the protocol."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import engine
from engine.ops import dropout_rows
from modelcenter.layers import host
from modelcenter.models.base import Model

Batch = Mapping[str, Any]
LossFn = Callable[[Any, Batch, Mapping[str, int]], Tensor]


def accumulate(
    model: Model,
    microbatches: Iterable[Batch],
    loss_fn: LossFn | None = None,
    *,
    backward: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Run forward and backward of this rank's microbatches as a part of one global batch.

    Afterwards every p.grad is the gradient of the mean over all labelled items of all microbatches on all ranks,
    however the batch was cut. A rank with fewer microbatches takes part with empty ones.

    Args:
        model: a model of ours, plain or sharded, in training mode.
        microbatches: keyword arguments of the model's forward, with labels. On the host, so that counting labels waits
            for no device; they are moved to the model's. With `row_ids` among them, int64, which rows of the data the
            sequences are, and inside engine.ops.dropout_key(seed, step), the masks of dropout too do not depend on how
            the batch is cut.
        loss_fn: `loss_fn(output, microbatch, totals)` -> 0-d, in place of the model's own loss: the sum over this
            microbatch's items, divided by `totals[term]`, the items of the global batch. Where it has them,
            `loss_fn.counts(microbatch)` is {term: items}, in place of the model's, and `loss_fn.inputs(microbatch)`
            what the model is given of a microbatch.
        backward: called with the loss in place of loss.backward(), such as OptimManager.backward.

    Returns:
        The global mean loss: 0-d, fp32, detached, equal on all ranks.

    Raises:
        ValueError: there are no microbatches on any rank, or a batch does not fit the model.
    """

    def forward(microbatch: Batch, totals: Mapping[str, int]) -> Tensor:
        batch = to_device(microbatch, model.device)
        with dropout_rows(batch.pop("row_ids", None)):
            out = model(**inputs(batch), loss_counts=totals)
        return out.loss if loss_fn is None else loss_fn(out, batch, totals)

    inputs, counts = parts_of(model, loss_fn)
    batches: Sequence[Batch] = list(microbatches)
    return engine.accumulate(model, batches, forward, counts, model.empty_batch, backward)


def parts_of(
    model: Model, loss_fn: LossFn | None
) -> tuple[Callable[[Batch], Batch], Callable[[Batch], Mapping[str, int]]]:
    """(what the model is given of a batch, what is counted in it): the loss function's, else all, and the model's."""
    return getattr(loss_fn, "inputs", dict), getattr(loss_fn, "counts", model.loss_counts)


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on the device, copied without waiting where it is a GPU."""
    return {name: host.to_device(value, device) for name, value in batch.items()}
