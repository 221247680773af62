"""The global batches of a run, in order: what each step trains on, as this rank sees it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

import engine
from modelcenter.data.streaming import StreamBatches


@dataclass(frozen=True)
class GlobalBatch:
    """What one step trains on.

    step: from 0. microbatches: this rank's, on the host. tokens: of all ranks. rows: row numbers of all ranks, or
    whatever the feed's `where` takes. state: what `Feed.batches` needs to go on after this batch, beside the step.
    """

    step: int
    microbatches: list[dict[str, Any]]
    tokens: int
    rows: Any
    state: dict[str, Any]


class Feed(Protocol):
    """Where the loop's batches come from. The order is a function of the flags and the data, not of the ranks."""

    steps: int  # of the run
    steps_per_epoch: int | None  # None: nobody knows before the data end

    def batches(self, step: int = 0, state: dict[str, Any] | None = None) -> Iterator[GlobalBatch]:
        """From a step on, to the end; state: that of the batch before it."""
        ...

    def epochs_at(self, step: int, state: Mapping[str, Any]) -> float:
        """Passes over the data when so many steps are done. state: that of the last one's batch."""
        ...

    def where(self, rows: Any, most: int = 4) -> str:
        """Where the rows of a global batch come from, for people."""
        ...


class Plan(Protocol):
    """Which rows make a global batch; see data.sampling."""

    lengths: np.ndarray  # of all rows

    @property
    def steps(self) -> int: ...

    def epoch(self, epoch: int) -> list[np.ndarray]: ...

    def deal(self, rows: np.ndarray, ranks: int, microbatches: int) -> list[list[np.ndarray]]: ...


def numbered(examples: Any, batch: dict[str, Any], rows: Any) -> dict[str, Any]:
    """A batch with numbers of its sequences, by which dropout draws the same masks however the rows are cut."""
    ids = examples.row_ids(rows)
    if len(batch["cu_seqlens"]) == len(ids) + 1:
        batch["row_ids"] = torch.from_numpy(np.asarray(ids, np.int64))
    return batch


class RowFeed:
    """Batches of rows that are all there: any step can be worked out from its number alone."""

    def __init__(self, examples: Any, plan: Plan, steps: int, microbatches: int):
        self.examples, self.plan, self.steps, self.microbatches = examples, plan, steps, microbatches
        self.steps_per_epoch = plan.steps

    def batches(self, step: int = 0, state: dict[str, Any] | None = None) -> Iterator[GlobalBatch]:
        epoch, plan = -1, []
        for number in range(step, self.steps):
            if number // self.plan.steps != epoch:
                epoch = number // self.plan.steps
                plan = self.plan.epoch(epoch)
            yield self.batch(number, plan[number % self.plan.steps], epoch)

    def batch(self, step: int, rows: np.ndarray, epoch: int) -> GlobalBatch:
        """This rank's microbatches of some rows; the empty ones of a short batch are left out."""
        own = self.plan.deal(rows, engine.data_size(), self.microbatches)[engine.data_rank()]
        made = [numbered(self.examples, self.examples.batch(part, epoch), part) for part in own if len(part)]
        return GlobalBatch(step, made, int(self.plan.lengths[rows].sum()), rows, {})

    def epochs_at(self, step: int, state: Mapping[str, Any]) -> float:
        return step / self.plan.steps

    def where(self, rows: np.ndarray, most: int = 4) -> str:
        return in_words([self.examples.where(int(row)) for row in rows[:most]], len(rows))


class StreamFeed:
    """Batches of rows that are read while training goes on. Its state is a few integers: the place and the epoch."""

    steps_per_epoch = None

    def __init__(self, examples: Any, stream: StreamBatches, steps: int, microbatches: int):
        self.examples, self.stream, self.steps, self.microbatches = examples, stream, steps, microbatches

    def batches(self, step: int = 0, state: dict[str, Any] | None = None) -> Iterator[GlobalBatch]:
        batches = self.stream.at((state or {}).get("stream"))
        for number in range(step, self.steps):
            batch = next(batches)
            own = batch.rank_numbers(engine.data_rank(), engine.data_size(), self.microbatches)
            rows = self.examples.rows_of(batch)
            parts = [[rows[i] for i in part] for part in own if len(part)]
            made = [numbered(self.examples, self.examples.batch(part, batch.epoch), part) for part in parts]
            state = {"stream": batch.state, "epoch": batch.epoch}
            yield GlobalBatch(number, made, int(batch.lengths.sum()), rows, state)

    def epochs_at(self, step: int, state: Mapping[str, Any]) -> float:
        """The epoch of the last step's rows. How far into it they are is not known before it ends."""
        return float(state.get("epoch", 0))

    def where(self, rows: Any, most: int = 4) -> str:
        return in_words([self.examples.where(row) for row in rows[:most]], len(rows))


def in_words(places: list[str], count: int) -> str:
    """Where `count` rows are, of which some places are shown."""
    return "; ".join(places) + (f" and {count - len(places)} more" if count > len(places) else "")
