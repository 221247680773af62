"""The source of a run's global batches: what each step trains on, in order, as this rank sees it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

import engine
from modelcenter.data.batching.mixture import Mixture, draw_of
from modelcenter.data.pretraining.text_rows import StreamRows
from modelcenter.data.sampling import EpochBatches, TokenBatches
from modelcenter.data.streaming import StreamBatches
from modelcenter.training.config import TrainConfig

_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class GlobalBatch:
    """What one step trains on.

    step: counts from 0. microbatches: this rank's, on the host. tokens: their number on all ranks. rows: row numbers on
    all ranks, or whatever the source's `where` takes. state: what `BatchSource.batches` needs besides the step to
    continue after this batch.
    """

    step: int
    microbatches: list[dict[str, Any]]
    tokens: int
    rows: Any
    state: dict[str, Any]


class BatchSource(Protocol):
    """Yields the loop's batches. Their order depends on the flags and the data, not on the number of ranks."""

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """None: not known before the end of the data."""
        ...

    def batches(self, step: int = 0, state: dict[str, Any] | None = None) -> Iterator[GlobalBatch]:
        """The batches from a step on. state: that of the batch before it."""
        ...

    def epochs_at(self, step: int, state: Mapping[str, Any]) -> float:
        """Passes over the data after so many steps. state: that of the last batch."""
        ...

    def where(self, rows: Any, most: int = 4) -> str:
        """Where the rows of a global batch come from, for messages; `most` of them are named."""
        ...

    def to_remember(self, rows: Any) -> Any:
        """The rows of a global batch in a compact form that `where` takes, to be kept for many batches."""
        ...


class BatchSampler(Protocol):
    """Which rows make a global batch; see data.sampling."""

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of all rows."""
        ...

    @property
    def steps(self) -> int: ...

    def epoch(self, epoch: int) -> Sequence[np.ndarray]: ...

    def deal(self, rows: np.ndarray, ranks: int, microbatches: int) -> list[list[np.ndarray]]: ...


class RowBatchSource:
    """Batches of rows that are all known beforehand, so that any step follows from its number alone."""

    def __init__(self, examples: Any, sampler: BatchSampler, steps: int, microbatches: int):
        """steps: of the run. microbatches: the maximum per rank and step."""
        self.examples, self.sampler, self.steps, self.microbatches = examples, sampler, steps, microbatches
        self.steps_per_epoch = sampler.steps

    def batches(self, step: int = 0, state: dict[str, Any] | None = None) -> Iterator[GlobalBatch]:
        for number, rows, epoch in self._rows(step, self.steps):
            yield self._batch(number, rows, epoch)

    def _rows(self, step: int, end: int) -> Iterator[tuple[int, np.ndarray, int]]:
        """(number, rows on all ranks, epoch) of the steps from `step` to `end` - 1."""
        epoch: int = -1
        batches: Sequence[np.ndarray] = ()
        for number in range(step, end):
            if number // self.sampler.steps != epoch:
                epoch = number // self.sampler.steps
                batches = self.sampler.epoch(epoch)
            yield number, batches[number % self.sampler.steps], epoch

    def _batch(self, step: int, rows: np.ndarray, epoch: int) -> GlobalBatch:
        """The batch of these rows, with this rank's microbatches, except empty ones of a short batch."""
        parts = self.sampler.deal(rows, engine.data_size(), self.microbatches)[engine.data_rank()]
        # New masks are drawn each time a row is used; a mixture may use it several times in an epoch.
        turn = step if isinstance(self.examples, Mixture) else epoch
        microbatches = [
            _with_row_ids(self.examples, self.examples.batch(part, turn), part) for part in parts if len(part)
        ]
        return GlobalBatch(step, microbatches, int(self.sampler.lengths[rows].sum()), rows, {})

    def epochs_at(self, step: int, state: Mapping[str, Any]) -> float:
        return step / self.sampler.steps

    def rows_taken(self, steps: int) -> np.ndarray:
        """The sorted numbers of the rows that the first `steps` steps use."""
        taken = np.zeros(len(self.sampler.lengths), bool)
        for number, rows, _ in self._rows(0, steps):
            taken[rows] = True
            if (number + 1) % self.sampler.steps == 0 and taken.all():
                break
        return np.flatnonzero(taken)

    def where(self, rows: np.ndarray, most: int = 4) -> str:
        return _join_places([self.examples.where(int(row)) for row in rows[:most]], len(rows))

    def to_remember(self, rows: np.ndarray) -> np.ndarray:
        return rows


class StreamBatchSource:
    """Batches of rows that are read during training. Its state is a few integers: the position and the epoch."""

    steps_per_epoch = None

    def __init__(self, examples: Any, stream: StreamBatches, steps: int, microbatches: int):
        self.examples, self.stream, self.steps, self.microbatches = examples, stream, steps, microbatches

    def batches(self, step: int = 0, state: dict[str, Any] | None = None) -> Iterator[GlobalBatch]:
        batches = self.stream.at((state or {}).get("stream"))
        for number in range(step, self.steps):
            batch = next(batches)
            numbers = batch.rank_numbers(engine.data_rank(), engine.data_size(), self.microbatches)
            rows = self.examples.rows_of(batch)
            parts = [[rows[i] for i in part] for part in numbers if len(part)]
            microbatches = [
                _with_row_ids(self.examples, self.examples.batch(part, batch.epoch), part) for part in parts
            ]
            state = {"stream": batch.state, "epoch": batch.epoch}
            yield GlobalBatch(number, microbatches, int(batch.lengths.sum()), rows, state)

    def epochs_at(self, step: int, state: Mapping[str, Any]) -> float:
        """The epoch of the last step's rows. The progress within an epoch is not known before it ends."""
        return float(state.get("epoch", 0))

    def where(self, rows: Any, most: int = 4) -> str:
        return _join_places([self.examples.where(row) for row in rows[:most]], len(rows))

    def to_remember(self, rows: Any) -> Any:
        return [row._replace(tokens=_NO_TOKENS) for row in rows]


def make_batch_source(cfg: TrainConfig, examples: Any) -> BatchSource:
    """The batches of a run, sized by rows or by tokens. A mixture draws its rows for each epoch."""
    assert cfg.gradient_accumulation_steps is not None
    if isinstance(examples, StreamRows):
        return stream_batch_source(cfg, examples)
    draw = draw_of(examples, cfg.seed)
    if cfg.batch_tokens is not None:
        assert cfg.global_batch_tokens is not None
        sizes = (cfg.global_batch_tokens, cfg.seed, cfg.batch_tokens)
        sampler: BatchSampler = TokenBatches(examples.lengths, *sizes, draw=draw)
    else:
        assert cfg.global_batch_size is not None
        sampler = EpochBatches(examples.lengths, cfg.global_batch_size, cfg.seed, draw)
    steps = cfg.max_steps or max(1, math.ceil(cfg.epochs * sampler.steps - 1e-6))
    return RowBatchSource(examples, sampler, steps, cfg.gradient_accumulation_steps)


def stream_batch_source(cfg: Any, examples: StreamRows) -> StreamBatchSource:
    """The batches of a run over a stream."""
    sizes: dict[str, Any] = {"global_batch_size": cfg.global_batch_size}
    if cfg.batch_tokens is not None:
        sizes = {"budget": cfg.global_batch_tokens, "part": cfg.batch_tokens}
    order: dict[str, Any] = {"length": examples.length, "several": True, "window": cfg.shuffle_window, "seed": cfg.seed}
    stream = StreamBatches(examples.source, examples.pieces, **sizes, **order)
    return StreamBatchSource(examples, stream, cfg.max_steps, cfg.gradient_accumulation_steps)


def _with_row_ids(examples: Any, batch: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Add row ids to a batch, so that dropout draws masks that do not depend on how batches are split."""
    batch["row_ids"] = torch.from_numpy(np.asarray(examples.row_ids(rows), np.int64))
    return batch


def _join_places(places: list[str], count: int) -> str:
    """The locations of some rows as text; `count` is the number of all."""
    return "; ".join(places) + (f" and {count - len(places)} more" if count > len(places) else "")
