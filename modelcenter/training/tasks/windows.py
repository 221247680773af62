"""What tasks share whose rows may be too long for the model: a row is read in several windows, and judged as one."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import engine
from modelcenter.data.sampling import evaluation_batches
from modelcenter.models.base import Model
from modelcenter.models.outputs import ModelOutput
from modelcenter.training.evaluation import evaluate, outputs
from modelcenter.training.metrics import Score, gather_lists
from modelcenter.training.tasks.base import Batches, Task, TokenExamples


@dataclass(frozen=True)
class WindowExamples(TokenExamples):
    """Examples that are windows of rows. owner: int64 (windows,), the row of each, in ascending order."""

    owner: np.ndarray

    def where(self, row: int) -> str:
        return self.table.where(int(self.owner[row]))


class WindowTask(Task):
    """A task whose examples are WindowExamples.

    What the model says of a window is kept on the host in a few numbers, so that all windows of a row can be put
    together, and no logits of many rows are held at once.
    """

    @abstractmethod
    def read_windows(self, examples: Any, windows: np.ndarray, out: ModelOutput) -> list[Any]:
        """What is kept of the model's output for each window of a batch."""

    @abstractmethod
    def judge(self, examples: Any, said: dict[int, list[Any]]) -> Score:
        """The score of these rows: {row: what was kept of its windows, in order}."""

    @abstractmethod
    def say(self, examples: Any, row: int, read: list[Any]) -> dict[str, Any]:
        """The prediction of a row; read: what was kept of its windows, none for a row without any."""

    @abstractmethod
    def count(self, examples: Any) -> int:
        """Rows, those without windows too."""

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        batches = Batches(examples, rank_window_batches(examples.owner, examples.lengths, batch_size))
        said: dict[int, list[Any]] = {}
        turns = iter(batches.rows)

        def feed(_: Any, out: ModelOutput, __: Any) -> None:
            self._keep(said, examples, next(turns), out)

        return {**evaluate(model, batches, None, feed), **self.judge(examples, said).result()}

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        batches = Batches(examples, rank_window_batches(examples.owner, examples.lengths, cfg.batch_size))
        said: dict[int, list[Any]] = {}
        for turn, out in outputs(model, batches):
            self._keep(said, examples, batches.rows[turn], out)
        # All ranks have done their part before anyone reads: only rank 0 will.
        every = dict(gather_lists([(row, self.say(examples, row, read)) for row, read in said.items()]))
        rows = range(self.count(examples) if engine.rank() == 0 else 0)
        return (every[row] if row in every else self.say(examples, row, []) for row in rows)

    def _keep(self, said: dict[int, list[Any]], examples: Any, windows: np.ndarray, out: ModelOutput) -> None:
        for window, found in zip(windows.tolist(), self.read_windows(examples, windows, out), strict=True):
            said.setdefault(int(examples.owner[window]), []).append(found)


def rank_window_batches(owner: np.ndarray, lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """This rank's batches of windows: all windows of a row are on one rank, one after another."""
    rows, starts = np.unique(owner, return_index=True)
    ends = np.append(starts[1:], len(owner))
    totals = np.add.reduceat(lengths, starts) if len(starts) else np.zeros(0, np.int64)
    mine = evaluation_batches(totals, batch_size, engine.data_size())[engine.data_rank()]
    windows = [np.arange(starts[row], ends[row]) for batch in mine for row in batch]
    flat = np.concatenate(windows) if windows else np.zeros(0, np.int64)
    return [flat[i : i + batch_size] for i in range(0, len(flat), batch_size)]
