"""Counters in shared memory: one process counts up, the others wait until the counter reaches a value.

A process that sees a new value also sees everything that was written before it. Without the compiled operators
(csrc/cpu/counters.h) waiting processes poll, which is only correct on processors that keep the order of writes.
"""

from __future__ import annotations

import platform
import time

import torch

from engine.ops import library

_ORDERED = ("x86_64", "AMD64")  # processors whose writes become visible to all others in program order
_AWAKE = 20  # polls without a pause
_PAUSE = 1e-4  # seconds between two polls


def usable() -> bool:
    """Whether processes can wait for counters on this machine."""
    return library.cpu().loaded or platform.machine() in _ORDERED


def count_to_(counter: torch.Tensor, value: int) -> None:
    """Raise a counter, an int64 tensor of one element that only this process writes, to a value."""
    if library.cpu().loaded:
        torch.ops.modelcenter.count_to_(counter, value)
    else:
        counter.fill_(value)


def reached(counter: torch.Tensor, value: int, seconds: float) -> bool:
    """Wait until a counter has at least this value, for at most so many seconds. Returns whether it has."""
    if library.cpu().loaded:
        found: bool = torch.ops.modelcenter.count_reached(counter, value, int(seconds * 1000))
        return found
    end, looks = time.monotonic() + seconds, 0
    while int(counter) < value:
        if time.monotonic() > end:
            return False
        time.sleep(0 if (looks := looks + 1) < _AWAKE else _PAUSE)
    return True
