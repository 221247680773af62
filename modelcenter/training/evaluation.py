"""Evaluation and prediction: every row once, exact numbers on any number of ranks."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import engine
from modelcenter.models.base import Model
from modelcenter.models.outputs import ModelOutput
from modelcenter.training.accumulation import Batch, LossFn, parts_of, to_device
from modelcenter.training.metrics import Score, sum_over_ranks, sums

Feed = Callable[[Any, ModelOutput, Any], None]

_TURNS_OF_A_PIPELINE = 8  # between two questions, for which its stages wait for each other
_asked: list[Callable[[], bool]] = []


class EvaluationStopped(Exception):
    """An evaluation was left between two batches, on all ranks."""


@contextmanager
def stoppable(asked: Callable[[], bool]) -> Iterator[None]:
    """Let what goes over batches inside raise EvaluationStopped once `asked` says so. asked: collective."""
    _asked.append(asked)
    try:
        yield
    finally:
        _asked.pop()


def check_stop() -> None:
    """A place between two batches, which all ranks come to equally often. Collective."""
    if _asked and _asked[-1]():
        raise EvaluationStopped


def evaluate(
    model: Model,
    batches: Sequence[Batch],
    metrics: Score | None = None,
    feed: Feed | None = None,
    loss_fn: LossFn | None = None,
) -> dict[str, float | None]:
    """The loss over all labelled items of all ranks, and the metrics of all rows. Collective.

    Args:
        model: a model of ours, plain or sharded; it is left in the mode (train or eval) it was in.
        batches: this rank's, with labels; read twice, the first time to count labels. Ranks may have different numbers.
        metrics: Metrics, fed with the logits and labels of every batch; or any Score, fed by
            `feed(metrics, output, batch)` (which may do without one).
        loss_fn: as for accumulate.

    Returns:
        {"loss": mean over the items (a sum of means, for a loss of several terms; None: there are no items),
        **metrics.result()}.
    """
    inputs, count = parts_of(model, loss_fn)
    terms = sorted(count(model.empty_batch()))
    own = [count(batch) for batch in (batches if _counts() else ())]
    counts = sums([sum(found[term] for found in own) for term in terms])
    totals = {term: max(1, n) for term, n in zip(terms, counts, strict=True)}
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for batch, out in _outputs(model, batches, totals, inputs):
        if batch is not None:
            total += (out.loss if loss_fn is None else loss_fn(out, batch, totals)).double()
            if metrics is not None or feed is not None:
                (feed or _feed)(metrics, out, batch)
        del out  # as in _outputs
    loss = sum_over_ranks(total).item()
    result: dict[str, float | None] = {"loss": loss if any(counts) else None}
    return {**result, **(metrics.result() if metrics is not None else {})}


def _feed(metrics: Any, out: ModelOutput, batch: Batch) -> None:
    metrics.update(out.logits, batch["labels"])


def logits_of(model: Model, batches: Sequence[Batch], places: Sequence[Tensor], rows: int, width: int) -> Tensor:
    """Logits of all rows of all ranks, in the order of the rows, on every rank. Collective.

    Args:
        batches: this rank's; places: the row numbers of each. rows, width: shape of what is returned.

    Returns:
        (rows, width) fp32 on the host.
    """
    return _placed(_outputs(model, batches, None, _unlabelled), "logits", places, rows, width)


def log_probs_of(
    model: Model, batches: Sequence[Batch], places: Sequence[Tensor], rows: int, width: int, loss_fn: LossFn
) -> Tensor:
    """As logits_of, of the log-probabilities of the labels of `width` neighbouring sequences; loss_fn: whose inputs ask
    for them."""
    return _placed(_outputs(model, batches, None, parts_of(model, loss_fn)[0]), "log_probs", places, rows, width)


def _placed(
    found: Iterator[tuple[Batch | None, ModelOutput]], name: str, places: Sequence[Tensor], rows: int, width: int
) -> Tensor:
    result = torch.zeros(rows, width)
    for turn, (batch, out) in enumerate(found):
        if batch is not None:
            result[places[turn]] = out[name].float().cpu().view(-1, width)
    return sum_over_ranks(result)  # a row is zero on all ranks but one, so the sum is exact


def outputs(model: Model, batches: Sequence[Batch]) -> Iterator[tuple[int, ModelOutput]]:
    """(number of the batch, what the model makes of it) of this rank's batches whose results count here. Collective."""
    for turn, (batch, out) in enumerate(_outputs(model, batches, None, _unlabelled)):
        if batch is not None:
            yield turn, out


def _unlabelled(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def _outputs(
    model: Model, batches: Sequence[Batch], totals: dict[str, int] | None, inputs: Callable[[Batch], Batch]
) -> Iterator[tuple[Batch | None, ModelOutput]]:
    """(batch on the device, output) of each batch, in eval mode; (None, ...) where another rank's output counts, or
    only other ranks have a batch left."""
    pipeline = model.pipeline
    if pipeline is not None:
        pipeline.check_same(batches)
    rounds = torch.tensor(len(batches), device=engine.device())
    if engine.world_size() > 1:
        dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
    was_training = model.training
    model.eval()
    try:
        for turn in range(int(rounds)):
            if pipeline is None or turn % _TURNS_OF_A_PIPELINE == 0:
                check_stop()
            mine = turn < len(batches)
            batch = to_device(batches[turn] if mine else model.empty_batch(), model.device)
            given = inputs(batch)
            forward = functools.partial(model, **given, loss_counts=totals)
            with torch.no_grad():
                out = forward() if pipeline is None else pipeline.forward(forward)
            yield (batch if mine and _counts() else None), out
            del out  # or its logits would be held beside those of the next batch
    finally:
        if pipeline is not None:
            pipeline.flush()
        model.train(was_training)


def _counts() -> bool:
    """Whether this rank's results are those of a batch: of ranks that compute it together, the first one's of the last
    stage."""
    return engine.runtime.stage() == engine.runtime.stages() - 1 and engine.rank() % engine.runtime.model_ranks() == 0
