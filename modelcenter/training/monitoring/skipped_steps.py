"""The steps of a run that changed nothing, as their gradient was not finite, and the rows they were made of."""

from collections.abc import Iterator
from typing import Any

import torch

from engine.optim import OptimManager
from modelcenter.training.batch_sources import Feed


class Skipped:
    """Finds out, when the device is read anyway, which of the steps since then were skipped.

    count: of the whole run, as of the last time that they were `found`.
    """

    def __init__(self, manager: OptimManager, feed: Feed):
        self.manager, self.feed = manager, feed
        self.count = 0
        self._recent: list[tuple[int, Any, torch.Tensor]] = []  # steps since then: number, rows, gradient norm
        self._looked_at = 0  # the last step that was

    def go_on_from(self, step: int) -> None:
        """A checkpoint of this step has been loaded."""
        self.count, self._looked_at = self.manager.skipped, step

    def add(self, step: int, rows: Any, norm: torch.Tensor) -> None:
        """Remember a step, whose norm stays on the device."""
        self._recent.append((step, rows, norm))

    def found(self, step: int) -> Iterator[dict[str, Any]]:
        """Those since the last time, as rows of skipped.jsonl. Waits for the device, if there are any."""
        total = self.manager.skipped
        steps = self._recent if total > self.count else []
        norms = torch.stack([norm.float() for _, _, norm in steps]).tolist() if steps else []
        for (number, rows, _), norm in zip(steps, norms, strict=True):
            if number > self._looked_at and not abs(norm) < float("inf"):
                yield {"step": number, "grad_norm": str(norm), "rows": self.feed.where(rows, most=10**9)}
        self.count, self._looked_at = total, step
        self._recent = self._recent[-2:]

    def newest_rows(self) -> str:
        """Where the rows of the newest steps are. On a GPU the bad step may be the one before the newest."""
        shown = [f"step {step}: {self.feed.where(rows)}" for step, rows, _ in self._recent[-2:]]
        return "Rows of the last steps: " + " | ".join(shown)
