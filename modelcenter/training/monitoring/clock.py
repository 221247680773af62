"""The clock of a run: seconds of training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import engine


class Clock:
    """Counts seconds of training, without evaluation and saving."""

    def __init__(self, before: float = 0.0):
        """before: seconds that the run took before it was stopped."""
        self._before = before
        self._started_at: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds counted so far."""
        return self._before + (0.0 if self._started_at is None else time.perf_counter() - self._started_at)

    def start(self) -> None:
        """Go on."""
        self._started_at = time.perf_counter()

    def pause(self) -> None:
        """Stop, after waiting for the device: work in a GPU's queue is not done yet."""
        if engine.device().type == "cuda":
            torch.cuda.synchronize()
        self._before, self._started_at = self.seconds, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is counted. After an exception the clock stays stopped."""
        self.pause()
        yield
        self.start()
