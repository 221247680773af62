"""The skipped steps of a run, which changed nothing because their gradient was not finite, and their rows."""

from collections.abc import Iterator
from typing import Any

import torch

from engine.optim import OptimManager
from modelcenter.training.batch_sources import BatchSource


class SkippedSteps:
    """Finds the skipped steps when the device is read anyway.

    count: the number of skipped steps in the whole run, as of the last call of `new_rows`.
    """

    def __init__(self, manager: OptimManager, source: BatchSource):
        self.manager, self.source = manager, source
        self.count = 0
        self._recent: list[tuple[int, Any, torch.Tensor]] = []  # steps since then: number, rows, gradient norm
        self._last_checked = 0  # a step

    def start_from(self, step: int) -> None:
        """Called when a checkpoint of this step has been loaded."""
        self.count, self._last_checked = self.manager.skipped, step

    def add(self, step: int, rows: Any, norm: torch.Tensor) -> None:
        """Record a step; its norm stays on the device."""
        self._recent.append((step, self.source.to_remember(rows), norm))

    def new_rows(self, step: int) -> Iterator[dict[str, Any]]:
        """The steps skipped since the last call, as rows of skipped.jsonl. Waits for the device, if there are any."""
        total = self.manager.skipped
        steps = self._recent if total > self.count else []
        norms = torch.stack([norm.float() for _, _, norm in steps]).tolist() if steps else []
        for (number, rows, _), norm in zip(steps, norms, strict=True):
            if number > self._last_checked and not abs(norm) < float("inf"):
                yield {"step": number, "grad_norm": str(norm), "rows": self.source.where(rows, most=10**9)}
        self.count, self._last_checked = total, step
        self._recent = self._recent[-2:]

    def rows_of_last_steps(self) -> str:
        """The locations of the rows of the last two steps. On a GPU the bad step may be the one before the last."""
        shown = [f"step {step}: {self.source.where(rows)}" for step, rows, _ in self._recent[-2:]]
        return "Rows of the last steps: " + " | ".join(shown)
