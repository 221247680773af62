"""Printing, memory and running averages: BMTrain's ``utils``."""

from __future__ import annotations

import resource
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from engine import runtime
from engine.memory import peak_resident
from engine.runtime import print_rank

__all__ = ["AverageRecorder", "print_block", "print_dict", "print_rank", "see_memory"]

_WIDTH = 60
_GB = 1 << 30


def print_block(title: str, content: str | None = None, file: TextIO | None = None) -> None:
    """Print a rule of 60 characters with ``title`` in its middle, and ``content`` below it."""
    file = file or sys.stdout
    print(f" {title} ".center(_WIDTH, "="), file=file)
    if content is not None:
        print(content, file=file)


def print_dict(title: str, content: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print ``content`` as a block of "key : value" lines; long values continue below."""
    width = -(-(max(map(len, content), default=0) + 3) // 4) * 4
    lines = []
    for key, value in content.items():
        first, *more = textwrap.wrap(str(value), max(8, _WIDTH - width), break_on_hyphens=False) or [""]
        lines.append(f"{key} :".ljust(width) + first)
        lines += [" " * width + line for line in more]
    print_block(title, "\n".join(lines) + "\n", file)


def see_memory(message: str, detail: bool = False) -> dict[str, float]:
    """Print ``message`` and the memory in use on rank 0. Returns this rank's memory: {name: GB}.

    "resident" and "peak_resident" are the process's host memory; "allocated" and "peak_allocated", on a GPU, are
    torch's. Resets the GPU's peak; that of the process cannot be reset.

    Args:
        detail: on a GPU, also print ``torch.cuda.memory_summary()``.
    """
    peak = peak_resident()
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    used = {"resident": now / _GB, "peak_resident": max(now, peak) / _GB}
    if runtime.device().type == "cuda":
        used["allocated"] = torch.cuda.memory_allocated() / _GB
        used["peak_allocated"] = torch.cuda.max_memory_allocated() / _GB
    print_rank(f"{message}: {', '.join(f'{name} {value:.2f} GB' for name, value in used.items())}")
    if runtime.device().type == "cuda":
        if detail:
            print_rank(torch.cuda.memory_summary())
        torch.cuda.reset_peak_memory_stats()
    return used


class AverageRecorder:
    """A running average, ``alpha * old + (1 - alpha) * new``, corrected for its bias towards the initial 0."""

    def __init__(self, alpha: float = 0.9, start_value: float = 0) -> None:
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha is {alpha!r}, expected at least 0 and below 1")
        self.alpha = alpha
        self._start, self._sum, self._steps = start_value, 0.0, 0

    def record(self, v: float) -> None:
        """Add a value."""
        self._sum = self._sum * self.alpha + v * (1 - self.alpha)
        self._steps += 1

    @property
    def value(self) -> float:
        """The average; ``start_value`` before the first ``record``."""
        return self._sum / (1 - self.alpha**self._steps) if self._steps else self._start
