"""Writing a run's checkpoints."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checkpoint import finish_save, save_checkpoint, wait_checkpoint
from engine.optim import OptimManager
from modelcenter.models.base import Model
from modelcenter.training.checkpoints.model_selection import ModelSelection
from modelcenter.training.output.folder import CHECKPOINTS, free_space


class CheckpointWriter:
    """Writes checkpoints while training continues.

    If one cannot be written, earlier ones stay. That is reported, and is an error only if the run ends with it.
    """

    def __init__(self, output: Path, keep: int, selection: ModelSelection, report: Callable[[str], None]):
        """keep: newest checkpoints to keep; the best one stays too. report: shows a line on the terminal."""
        self._output, self._keep, self._selection, self._report = output, keep, selection, report
        self._started_at = time.monotonic()  # the last checkpoint, or the run

    @property
    def minutes_since_last(self) -> float:
        return (time.monotonic() - self._started_at) / 60

    def finish_last(self, step: int, best: int | None) -> None:
        """Finish saving the newest checkpoint, from which the run resumes: it may have been killed before `last` and
        `best` were set. Collective.

        Args:
            best: the step of the checkpoint that `best` must name.
        """
        finish_save(self._output / CHECKPOINTS, step, best=best, keep=self._keep)

    def write(
        self,
        step: int,
        model: Model,
        manager: OptimManager,
        state: dict[str, Any],
        write_extra: Callable[[Path], None],
        wait: bool,
    ) -> None:
        """Write a checkpoint of this step, once the previous one is on disk. Collective.

        Args:
            state: the run's state besides model and optimizer; the selection's is added. write_extra: writes further
                files into the folder that it is given. wait: wait until the checkpoint is on disk, as the run ends.

        Raises:
            OSError: with `wait`, on all ranks: it could not be written.
        """
        self.wait()
        is_best = self._selection.would_be_best_on_disk(step)
        state = {**state, **self._selection.state(is_best)}
        options: dict[str, Any] = {"step": step, "keep": self._keep, "best": is_best, "extra": write_extra}
        self._started_at = time.monotonic()
        try:
            save_checkpoint(self._output / CHECKPOINTS, model, manager, state, asynchronous=not wait, **options)
            self._selection.checkpoint_started(is_best)
        except (OSError, RuntimeError) as error:
            failure = self._failure(f"step {step}: the checkpoint", error)
            if wait:
                raise OSError(failure) from error
            self._report(failure)

    def wait(self) -> None:
        """Wait until the checkpoint in progress is on disk. Collective."""
        try:
            wait_checkpoint()
            self._selection.checkpoint_ended(written=True)
        except (OSError, RuntimeError) as error:
            self._selection.checkpoint_ended(written=False)
            self._report(self._failure("the last checkpoint", error))

    def _failure(self, what: str, error: Exception) -> str:
        return f"{what} could not be written: {error}; with what was written of it removed, {free_space(self._output)}"
