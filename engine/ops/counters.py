"""Counters in memory that processes share: one process counts up, the others wait until it has come far enough.

Whoever sees a new value sees all that was written before it. Without the compiled operators (csrc/cpu/counters.h) a
process that waits looks again and again; that its looks come in order only some processors promise.
"""

from __future__ import annotations

import platform
import time

import torch

from engine.ops import library

_ORDERED = ("x86_64", "AMD64")  # processors whose writes all others see in the order in which they were made
_AWAKE = 20  # looks without a pause
_PAUSE = 1e-4  # seconds between two looks


def usable() -> bool:
    """Whether counters can be waited for here."""
    return library.cpu().loaded or platform.machine() in _ORDERED


def count_to_(counter: torch.Tensor, value: int) -> None:
    """Set a counter, one int64 number that only this process sets, to a higher value."""
    if library.cpu().loaded:
        torch.ops.modelcenter.count_to_(counter, value)
    else:
        counter.fill_(value)


def reached(counter: torch.Tensor, value: int, seconds: float) -> bool:
    """Wait until a counter has at least this value, at most for some seconds. Returns whether it has."""
    if library.cpu().loaded:
        found: bool = torch.ops.modelcenter.count_reached(counter, value, int(seconds * 1000))
        return found
    end, looks = time.monotonic() + seconds, 0
    while int(counter) < value:
        if time.monotonic() > end:
            return False
        time.sleep(0 if (looks := looks + 1) < _AWAKE else _PAUSE)
    return True
