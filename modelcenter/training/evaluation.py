"""Evaluation and prediction: every row once, exact numbers on any number of ranks."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from modelcenter.layers.host_copies import batch_to_device
from modelcenter.layers.modes import evaluating
from modelcenter.models.base import Model
from modelcenter.models.outputs import ModelOutput
from modelcenter.training.accumulation import Batch, LossFn, TrainingLoss, training_loss
from modelcenter.training.metrics import Score, greatest, is_counted, sum_over_ranks, sums

MetricUpdate = Callable[[Any, ModelOutput, Any], None]


class Batches(Protocol):
    """Batches by number, which may be made when they are read, and are read more than once."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def __getitem__(self, number: int, /) -> Batch: ...


_PIPELINE_BATCHES = 8  # between two checks for a stop, at which the stages of a pipeline wait for each other
_should_stop: ContextVar[Callable[[], bool] | None] = ContextVar("should_stop", default=None)  # see `stoppable`


class EvaluationStopped(Exception):
    """An evaluation was stopped between two batches, on all ranks."""


@contextmanager
def stoppable(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Let evaluations and generation inside the block raise EvaluationStopped between two batches once `should_stop`,
    which is collective, returns true."""
    token = _should_stop.set(should_stop)
    try:
        yield
    finally:
        _should_stop.reset(token)


def check_stop() -> None:
    """Raise EvaluationStopped if the innermost `stoppable` block says so. For a point between two batches that all
    ranks reach equally often. Collective."""
    should_stop = _should_stop.get()
    if should_stop is not None and should_stop():
        raise EvaluationStopped


def evaluate(
    model: Model,
    batches: Batches,
    metrics: Score | None = None,
    feed: MetricUpdate | None = None,
    loss_fn: LossFn | None = None,
) -> dict[str, float | None]:
    """The loss over all labelled items of all ranks, and the metrics of all rows. Collective.

    Args:
        model: a model of ours, plain or sharded; each of its modules is left in the mode (train or eval) it was in.
        batches: this rank's, with labels; read twice, the first time to count labels. Ranks may have different numbers.
        metrics: Metrics, updated with the logits and labels of every batch; or any Score, with `feed`.
        feed: updates the metrics, `feed(metrics, output, batch)`; it may also be given without metrics.
        loss_fn: as for accumulate.

    Returns:
        {"loss": mean over the items (a sum of means, for a loss of several terms; None: there are no items),
        **metrics.result()}.
    """
    loss = training_loss(model, loss_fn)
    terms = sorted(loss.counts(model.empty_batch()))
    rank_counts = [loss.counts(batch) for batch in (batches if is_counted() else ())]
    counts = sums([sum(found[term] for found in rank_counts) for term in terms])
    totals = {term: max(1, n) for term, n in zip(terms, counts, strict=True)}
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for batch, out in _outputs(model, batches, totals, loss.inputs):
        if batch is not None:
            total += loss(out, batch, totals).double()
            if metrics is not None or feed is not None:
                (feed or _update_metrics)(metrics, out, batch)
        del out  # as in _outputs
    mean = sum_over_ranks(total).item()
    result: dict[str, float | None] = {"loss": mean if any(counts) else None}
    return {**result, **(metrics.result() if metrics is not None else {})}


def _update_metrics(metrics: Any, out: ModelOutput, batch: Batch) -> None:
    metrics.update(out.logits, batch["labels"])


def logits_of(model: Model, batches: Batches, places: Sequence[Tensor], rows: int, width: int) -> Tensor:
    """Logits of all rows of all ranks, in the order of the rows, on every rank. Collective.

    Args:
        batches: this rank's; places: the row numbers of each. rows, width: shape of what is returned.

    Returns:
        (rows, width) fp32 on the host.
    """
    return _in_row_order(_outputs(model, batches, None, _unlabelled), "logits", places, rows, width)


def embeddings_of(model: Model, batches: Batches, places: Sequence[Tensor], rows: int, width: int) -> Tensor:
    """The embeddings of all texts; otherwise as logits_of. places: the numbers of the texts of each batch."""
    return _in_row_order(_outputs(model, batches, None, _unlabelled), "embeddings", places, rows, width)


def log_probs_of(
    model: Model, batches: Batches, places: Sequence[Tensor], rows: int, width: int, loss_fn: TrainingLoss
) -> Tensor:
    """The log-probabilities of the labels of `width` neighbouring sequences; otherwise as logits_of.

    Args:
        loss_fn: asks the model for log-probabilities in its `inputs`.
    """
    return _in_row_order(_outputs(model, batches, None, loss_fn.inputs), "log_probs", places, rows, width)


def _in_row_order(
    found: Iterator[tuple[Batch | None, ModelOutput]], name: str, places: Sequence[Tensor], rows: int, width: int
) -> Tensor:
    """(rows, width) one output of all batches of all ranks, on every rank."""
    result = torch.zeros(rows, width)
    for number, (batch, out) in enumerate(found):
        if batch is not None:
            result[places[number]] = out[name].float().cpu().view(-1, width)
    return sum_over_ranks(result)  # a row is zero on all ranks but one, so the sum is exact


def outputs(model: Model, batches: Batches) -> Iterator[tuple[int, ModelOutput]]:
    """(number of the batch, the model's output) of this rank's batches whose results count here. Collective."""
    for number, (batch, out) in enumerate(_outputs(model, batches, None, _unlabelled)):
        if batch is not None:
            yield number, out


def _unlabelled(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def _outputs(
    model: Model, batches: Batches, totals: dict[str, int] | None, inputs: Callable[[Batch], Batch]
) -> Iterator[tuple[Batch | None, ModelOutput]]:
    """(batch on the device, output) of each batch, in eval mode; (None, ...) where another rank's output counts, or
    only other ranks have a batch left."""
    pipeline = model.pipeline
    if pipeline is not None:
        pipeline.check_same(batches)
    rounds = greatest(len(batches))
    with evaluating(model):
        try:
            for turn in range(rounds):
                if pipeline is None or turn % _PIPELINE_BATCHES == 0:
                    check_stop()
                mine = turn < len(batches)
                batch = batch_to_device(batches[turn] if mine else model.empty_batch(), model.device)
                given = inputs(batch)
                forward = functools.partial(model, **given, loss_counts=totals)
                with torch.no_grad():
                    out = forward() if pipeline is None else pipeline.forward(forward)
                yield (batch if mine and is_counted() else None), out
                del out  # or its logits would be held beside those of the next batch
        finally:
            if pipeline is not None:
                pipeline.flush()
