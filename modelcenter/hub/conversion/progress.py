"""Progress of a long job: bytes done, throughput and the time left, on stderr."""

import sys
import time
from collections.abc import Callable

Report = Callable[[int], None]  # called with the bytes done since the last report


class Progress:
    """Reports the bytes done of a known total, the throughput and the time left, on stderr."""

    def __init__(self, what: str, total: int, shown: bool = True):
        self.what, self.total, self.done, self.shown = what, total, 0, shown
        self._began = self._last = time.monotonic()
        self._terminal = shown and sys.stderr.isatty()
        self._printed = False

    def add(self, count: int) -> None:
        """Add `count` bytes, and update the line from time to time."""
        self.done += count
        now = time.monotonic()
        if now - self._last >= (0.5 if self._terminal else 10):
            self._last = now
            self._print(now)

    def close(self) -> None:
        """Print the last line."""
        if self._printed or (self.shown and self.total >= 2**30):
            self._print(time.monotonic())
            if self._terminal and self.shown:
                print(file=sys.stderr)

    def _print(self, now: float) -> None:
        if self.shown:
            self._printed = True
            print(self.text(now - self._began), end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def text(self, seconds: float) -> str:
        """The line after this number of seconds."""
        rate = self.done / max(seconds, 1e-9)
        left = f", {_duration((self.total - self.done) / rate)} left" if rate and self.done < self.total else ""
        line = f"{self.what}: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s{left}"
        return f"\r{line:<78}" if self._terminal else line


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )
