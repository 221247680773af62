"""The clock of a run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import engine


class Clock:
    """Seconds of training, evaluation and saving not among them."""

    def __init__(self, before: float = 0.0):
        """before: seconds of the run until it was stopped."""
        self._before = before
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._before + (0.0 if self._began is None else time.perf_counter() - self._began)

    def start(self) -> None:
        """Go on."""
        self._began = time.perf_counter()

    def pause(self) -> None:
        """Stop, once the device has done what it was told: a GPU's queue does not count as done."""
        if engine.device().type == "cuda":
            torch.cuda.synchronize()
        self._before, self._began = self.seconds, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still inside. After an exception it does not go on."""
        self.pause()
        yield
        self.start()
