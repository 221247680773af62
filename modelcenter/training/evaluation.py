"""Evaluation and prediction: each row counts once, and numbers are exact on any number of ranks."""

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
    """A sequence of batches, which may be made when they are read, and are read more than once."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def __getitem__(self, number: int, /) -> Batch: ...


_PIPELINE_BATCHES = 8  # between two checks for a stop, in which the stages of a pipeline wait for each other
_should_stop: ContextVar[Callable[[], bool] | None] = ContextVar("should_stop", default=None)  # see `stoppable`


class EvaluationStopped(Exception):
    """An evaluation was stopped between two batches, on all ranks."""


@contextmanager
def stoppable(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Inside, evaluation and generation raise EvaluationStopped between two batches once `should_stop`, which is
    collective, returns true."""
    token = _should_stop.set(should_stop)
    try:
        yield
    finally:
        _should_stop.reset(token)


def check_stop() -> None:
    """Raise EvaluationStopped if the innermost `stoppable` block says so. Call it between two batches, equally often on
    all ranks. Collective."""
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
        batches: this rank's, with labels; read twice, first to count labels. Ranks may have different numbers of them.
        metrics: Metrics, updated with the logits and labels of every batch; or any Score, with `feed`.
        feed: `feed(metrics, output, batch)` updates the metrics; it may also be given without metrics.
        loss_fn: as in `accumulate`.

    Returns:
        {"loss": the mean over the items (for a loss of several terms, the sum of their means; None: there are no
        items), **metrics.result()}.
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
    """The logits of all ranks' rows, in row order, on every rank. Collective.

    Args:
        batches: this rank's. places: the row numbers of each batch. rows, width: the shape of the result.

    Returns:
        (rows, width) fp32 on the host.
    """
    return _in_row_order(_outputs(model, batches, None, _unlabelled), "logits", places, rows, width)


def embeddings_of(model: Model, batches: Batches, places: Sequence[Tensor], rows: int, width: int) -> Tensor:
    """As `logits_of`, for embeddings. places: the numbers of the texts of each batch."""
    return _in_row_order(_outputs(model, batches, None, _unlabelled), "embeddings", places, rows, width)


def token_embeddings_of(model: Model, batches: Batches, places: Sequence[Tensor], tokens: int, width: int) -> Tensor:
    """As `logits_of`, for the vectors of all tokens. places: the numbers of the tokens of each batch."""
    return _in_row_order(_outputs(model, batches, None, _unlabelled), "token_embeddings", places, tokens, width)


def log_probs_of(
    model: Model, batches: Batches, places: Sequence[Tensor], rows: int, width: int, loss_fn: TrainingLoss
) -> Tensor:
    """As `logits_of`, for the log-probabilities of the labels of `width` neighbouring sequences.

    Args:
        loss_fn: its `inputs` ask the model for log-probabilities.
    """
    return _in_row_order(_outputs(model, batches, None, loss_fn.inputs), "log_probs", places, rows, width)


def _in_row_order(
    found: Iterator[tuple[Batch | None, ModelOutput]], name: str, places: Sequence[Tensor], rows: int, width: int
) -> Tensor:
    """The output `name` of all ranks' batches as (rows, width), on every rank."""
    result = torch.zeros(rows, width)
    for number, (batch, out) in enumerate(found):
        if batch is not None:
            result[places[number]] = out[name].float().cpu().view(-1, width)
    return sum_over_ranks(result)  # exact, because a row is zero on all ranks but one


def outputs(model: Model, batches: Batches) -> Iterator[tuple[int, ModelOutput]]:
    """(number of a batch, the model's output) for those of this rank's batches whose results count here. Collective."""
    for number, (batch, out) in enumerate(_outputs(model, batches, None, _unlabelled)):
        if batch is not None:
            yield number, out


def _unlabelled(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def _outputs(
    model: Model, batches: Batches, totals: dict[str, int] | None, inputs: Callable[[Batch], Batch]
) -> Iterator[tuple[Batch | None, ModelOutput]]:
    """(batch on the device, output) of each batch, in eval mode; (None, ...) if another rank's output counts, or only
    other ranks have a batch left."""
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
                del out  # otherwise its logits would be held beside those of the next batch
        finally:
            if pipeline is not None:
                pipeline.flush()
