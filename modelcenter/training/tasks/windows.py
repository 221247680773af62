"""Tasks whose rows may be too long for the model, which then reads a row in several windows, judged together."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import engine
from modelcenter.data.sampling import evaluation_batches
from modelcenter.models.base import Model
from modelcenter.models.outputs import ModelOutput
from modelcenter.training.evaluation import outputs
from modelcenter.training.metrics import Score, gather_lists
from modelcenter.training.tasks.base import Task
from modelcenter.training.tasks.examples import Batches, TokenExamples


@dataclass(frozen=True)
class WindowExamples(TokenExamples):
    """Windows of rows. owner: int64 (windows,), the row of each window, ascending."""

    owner: np.ndarray

    def where(self, row: int) -> str:
        return self.table.where(int(self.owner[row]))


class WindowTask(Task):
    """A task whose examples are WindowExamples.

    The model's output for a window is reduced to a few numbers on the host, its result, so that the windows of a row
    can be combined without holding the logits of many rows.
    """

    @abstractmethod
    def window_results(self, examples: Any, windows: np.ndarray, out: ModelOutput) -> list[Any]:
        """The result of each window of a batch, from the model's output for it."""

    @abstractmethod
    def score(self, examples: Any, results: dict[int, list[Any]]) -> Score:
        """The metrics of the rows in results: {row: the results of its windows, in order}."""

    @abstractmethod
    def prediction(self, examples: Any, row: int, results: list[Any]) -> dict[str, Any]:
        """The prediction for a row. results: of its windows; empty if it has none."""

    @abstractmethod
    def count_rows(self, examples: Any) -> int:
        """The number of rows, including those without windows."""

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        batches = Batches(examples, rank_window_batches(examples.owner, examples.lengths, batch_size))
        results: dict[int, list[Any]] = {}
        windows_of_batches = iter(batches.rows)

        def update(_: Any, out: ModelOutput, __: Any) -> None:
            self._add_results(results, examples, next(windows_of_batches), out)

        loss = self.run_evaluation(model, batches, None, update)
        return {**loss, **self.score(examples, results).result()}

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        batches = Batches(examples, rank_window_batches(examples.owner, examples.lengths, cfg.batch_size))
        results: dict[int, list[Any]] = {}
        for number, out in outputs(model, batches):
            self._add_results(results, examples, batches.rows[number], out)
        # Collective, so it must come before the iterator, which only rank 0 reads.
        predictions = dict(gather_lists([(row, self.prediction(examples, row, r)) for row, r in results.items()]))
        rows = range(self.count_rows(examples) if engine.rank() == 0 else 0)
        return (predictions[row] if row in predictions else self.prediction(examples, row, []) for row in rows)

    def _add_results(self, results: dict[int, list[Any]], examples: Any, windows: np.ndarray, out: ModelOutput) -> None:
        for window, result in zip(windows.tolist(), self.window_results(examples, windows, out), strict=True):
            results.setdefault(int(examples.owner[window]), []).append(result)


def rank_window_batches(owner: np.ndarray, lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """This rank's batches of windows; all windows of a row are on one rank, in order."""
    rows, starts = np.unique(owner, return_index=True)
    ends = np.append(starts[1:], len(owner))
    totals = np.add.reduceat(lengths, starts) if len(starts) else np.zeros(0, np.int64)
    rank_rows = evaluation_batches(totals, batch_size, engine.data_size())[engine.data_rank()]
    windows = [np.arange(starts[row], ends[row]) for batch in rank_rows for row in batch]
    flat = np.concatenate(windows) if windows else np.zeros(0, np.int64)
    return [flat[i : i + batch_size] for i in range(0, len(flat), batch_size)]
