"""Ending a run in order: signals and the time that it may take, agreed on by all ranks."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

import engine
from modelcenter.command_line.errors import Stopped

_TWICE = 1.0  # seconds between two Ctrl-C that are meant as two: launchers pass the first one on
_GRACE = 25.0  # seconds after a signal until a run that is inside one long step leaves it; launchers kill after 30


class Stopping:
    """While it is entered, the first SIGTERM, SIGUSR1 or SIGINT, or the end of the time, lets the run end after a step.

    Only a main thread is told of signals. A second SIGINT raises Stopped at once. Where a step takes longer than
    launchers wait, the process leaves without it: the newest whole checkpoint is what the run goes on from.

    Attributes:
        reason: why the run stops, once all ranks agreed to; None: it does not.
    """

    def __init__(
        self,
        seconds: float | None,
        leave: Callable[[str], Any] | None = None,
        began: float | None = None,
        grace: float = _GRACE,
    ):
        """seconds: time until the run stops by itself, counted from `began` (by time.monotonic(); None: now). leave:
        called with the reason before the process leaves a step that takes too long."""
        self.reason: str | None = None
        self._ends = None if seconds is None else (time.monotonic() if began is None else began) + seconds
        self._signal: int | None = None
        self._told_at = 0.0
        self._leave, self._grace = leave, grace
        self._may_leave = True  # what takes too long
        self._watch: threading.Timer | None = None
        self._before: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> Self:
        if engine.world_size() > 1 and engine.device().type == "cuda":
            # Asking must not wait for the device.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=engine.runtime.current().timeout))
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM, signal.SIGINT]
            if signal.getsignal(signal.SIGUSR1) in (
                signal.SIG_DFL,
                signal.SIG_IGN,
            ):  # not the caller's own, as submitit
                numbers.append(signal.SIGUSR1)  # what SLURM is often told to send
            self._before = {number: signal.signal(number, self._told) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait_for_the_end()
        for number, handler in self._before.items():
            # One that was not installed from Python cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def wait_for_the_end(self) -> None:
        """No step is left that could take too long: what comes now is worth the time that a launcher gives."""
        self._may_leave = False
        if self._watch is not None:
            self._watch.cancel()

    def asked(self) -> bool:
        """Whether the run shall end now; the same on all ranks. Collective."""
        late = self._ends is not None and time.monotonic() > self._ends
        code = self._signal or (_TIME if late else 0)
        code = self._most(code)
        if code and self.reason is None:
            self.reason = "max_time passed" if code == _TIME else f"stopped by {signal.Signals(code).name}"
            self._signal = None if code == _TIME else code
            if self._watch is not None:
                self._watch.cancel()
        return self.reason is not None

    def any_rank(self, value: bool) -> bool:
        """Whether it is true on any rank. Collective."""
        return bool(self._most(int(value)))

    def raise_if_interrupted(self) -> None:
        """SIGINT ends a program with an error, unlike SIGTERM and the end of the time, which are planned."""
        if self.reason is not None and self._signal == signal.SIGINT:
            raise Stopped(signal.SIGINT)

    def _most(self, value: int) -> int:
        if engine.world_size() == 1:
            return value
        box = torch.tensor(value)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group)
        return int(box)

    def _told(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            if number == signal.SIGINT and time.monotonic() - self._told_at > _TWICE:
                raise Stopped(number)
            return
        self._signal, self._told_at = number, time.monotonic()
        if self._may_leave:
            self._watch = threading.Timer(self._grace, self._abandon)
            self._watch.daemon = True
            self._watch.start()

    def _abandon(self) -> None:
        """The step that was under way when the signal came is not done yet."""
        assert self._signal is not None
        try:
            if self._leave is not None:
                name = signal.Signals(self._signal).name
                self._leave(f"stopped by {name} in a step of more than {self._grace:g} s; the last checkpoint counts")
        except Exception as error:  # such as a full disk: said, and no reason to stay
            print(f"error: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(128 + self._signal if self._signal == signal.SIGINT else 0)


_TIME = 1 << 10  # above every signal's number
