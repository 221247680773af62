"""Forward and backward of microbatches as one global batch, for models that follow the model protocol."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

import engine
from engine.ops import dropout_rows
from modelcenter.layers.host_copies import batch_to_device
from modelcenter.models.base import Model
from modelcenter.training.expert_balance import balanced
from modelcenter.training.joint_loss import JointLoss, accumulate_jointly

Batch = Mapping[str, Any]
LossFn = Callable[[Any, Batch, Mapping[str, int]], Tensor]


@runtime_checkable
class TrainingLoss(Protocol):
    """A loss that is a sum of means over the items of a global batch. The usual one is ModelLoss."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The keyword arguments of the model's forward, from a batch."""
        ...

    def counts(self, batch: Batch) -> Mapping[str, int]:
        """{term: items of the batch}."""
        ...

    def __call__(self, out: Any, batch: Batch, totals: Mapping[str, int]) -> Tensor:
        """The loss of the batch, 0-d: the sum over its items, each term divided by `totals[term]`, the number of items
        in the global batch. out: the model's output for `inputs(batch)`."""
        ...


class ModelLoss:
    """The loss that the model's own head computes."""

    def __init__(self, model: Model):
        self.model = model

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return dict(batch)

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return self.model.loss_counts(batch)

    def __call__(self, out: Any, batch: Batch, totals: Mapping[str, int]) -> Tensor:
        return out.loss


class _FunctionLoss(ModelLoss):
    """A function given by the caller, which may have attributes `inputs` and `counts`."""

    def __init__(self, model: Model, function: LossFn):
        super().__init__(model)
        self.function = function

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return getattr(self.function, "inputs", super().inputs)(batch)

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return getattr(self.function, "counts", super().counts)(batch)

    def __call__(self, out: Any, batch: Batch, totals: Mapping[str, int]) -> Tensor:
        return self.function(out, batch, totals)


def training_loss(model: Model, loss_fn: LossFn | None) -> TrainingLoss:
    """The loss of `accumulate` and `evaluate`: `loss_fn`, with the model's `inputs` and `counts` if it has none of its
    own; None: the model's loss."""
    if loss_fn is None:
        return ModelLoss(model)
    return loss_fn if isinstance(loss_fn, TrainingLoss) else _FunctionLoss(model, loss_fn)


def accumulate(
    model: Model,
    microbatches: Iterable[Batch],
    loss_fn: LossFn | JointLoss | None = None,
    *,
    backward: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Run forward and backward of this rank's microbatches as part of one global batch. Collective.

    Afterwards every p.grad is the gradient of the mean over all labelled items of all microbatches on all ranks,
    however the batch was split. A rank with fewer microbatches takes part with empty ones.

    Args:
        model: a model of ours, plain or sharded, in training mode.
        microbatches: keyword arguments of the model's forward, with labels. They are on the host, so that counting
            labels waits for no device, and are moved to the model's device. If they have `row_ids` (int64, the rows of
            the data that the sequences come from), and inside engine.ops.dropout_key(seed, step), dropout masks do not
            depend on how the batch is cut either.
        loss_fn: `loss_fn(output, microbatch, totals)` -> 0-d, in place of the model's own loss: the sum over this
            microbatch's items, divided by `totals[term]`, the number of items in the global batch. Optional attributes:
            `loss_fn.counts(microbatch)` -> {term: items}, in place of the model's, and `loss_fn.inputs(microbatch)` ->
            what the model is given of a microbatch. Or a JointLoss, over all items of the global batch together.
        backward: called with the loss instead of loss.backward(), such as OptimManager.backward.

    Returns:
        The global mean loss: 0-d, fp32, detached, equal on all ranks.

    Raises:
        ValueError: no rank has a microbatch, or a batch does not fit the model.
    """
    if isinstance(loss_fn, JointLoss):
        return accumulate_jointly(model, microbatches, loss_fn, backward)
    loss = training_loss(model, loss_fn)

    def forward(microbatch: Batch, totals: Mapping[str, int]) -> Tensor:
        batch = batch_to_device(microbatch, model.device)
        with dropout_rows(batch.pop("row_ids", None)):
            out = model(**loss.inputs(batch), loss_counts=totals)
        return loss(out, batch, totals)

    batches: Sequence[Batch] = list(microbatches)
    with balanced(model, batches, loss) as batches:
        return engine.accumulate(model, batches, forward, loss.counts, model.empty_batch, backward)
