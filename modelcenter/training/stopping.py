"""Stopping a run in order: on signals and at the end of its time, agreed on by all ranks."""

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

_SECOND_INTERRUPT = 1.0  # seconds after which another SIGINT is a second Ctrl-C: launchers pass the first one on, too
_KILLED_AFTER = 30  # seconds from a signal until launchers kill, unless torchrun was told otherwise
_TIME_IS_UP = 1 << 10  # a reason to stop, above every signal's number


class Stopping:
    """A context manager: the first SIGTERM, SIGUSR1 or SIGINT, or the end of the time, stops the run after a step.

    Only a main thread gets signals. A second SIGINT raises Stopped at once. Where a step takes longer than launchers
    wait, the process ends in the middle of it: the run goes on from its newest whole checkpoint.

    Attributes:
        reason: why the run stops, once all ranks have agreed to; None: it does not.
    """

    def __init__(
        self,
        seconds: float | None,
        on_abandon: Callable[[str], Any] | None = None,
        began: float | None = None,
        grace: float | None = None,
    ):
        """
        Args:
            seconds: time until the run stops by itself, counted from `began` (by time.monotonic(); None: now).
            on_abandon: called with the reason before the process ends in the middle of a step.
            grace: seconds that a step may take after a signal; None: all but the last of those that torchrun gives.
        """
        self.reason: str | None = None
        self._deadline = None if seconds is None else (time.monotonic() if began is None else began) + seconds
        self._signal: int | None = None
        self._signalled_at = 0.0
        self._on_abandon, self._grace = on_abandon, _default_grace() if grace is None else grace
        self._may_abandon = True
        self._watch: threading.Timer | None = None
        self._previous_handlers: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> Self:
        if engine.world_size() > 1 and engine.device().type == "cuda":
            # should_stop must not wait for the device.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=engine.runtime.current().timeout))
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM, signal.SIGINT]
            if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):  # submitit, for one, has its own
                numbers.append(signal.SIGUSR1)  # which SLURM is often told to send
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_of_steps()
        for number, handler in self._previous_handlers.items():
            # One that was not installed from Python cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def end_of_steps(self) -> None:
        """Abandon nothing any more: the work after the last step is worth the time that a launcher gives."""
        self._may_abandon = False
        if self._watch is not None:
            self._watch.cancel()

    def should_stop(self) -> bool:
        """Whether the run shall end now; the same on all ranks. Collective."""
        time_is_up = self._deadline is not None and time.monotonic() > self._deadline
        code = self._max_over_ranks(self._signal or (_TIME_IS_UP if time_is_up else 0))
        if code and self.reason is None:
            self.reason = "max_time passed" if code == _TIME_IS_UP else f"stopped by {signal.Signals(code).name}"
            self._signal = None if code == _TIME_IS_UP else code
            if self._watch is not None:
                self._watch.cancel()
        return self.reason is not None

    def any_rank(self, value: bool) -> bool:
        """Whether it is true on any rank. Collective."""
        return bool(self._max_over_ranks(int(value)))

    def raise_if_interrupted(self) -> None:
        """Raise Stopped after SIGINT, which is an error for a program; SIGTERM and the end of the time are planned."""
        if self.reason is not None and self._signal == signal.SIGINT:
            raise Stopped(signal.SIGINT)

    def _max_over_ranks(self, value: int) -> int:
        if engine.world_size() == 1:
            return value
        highest = torch.tensor(value)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._group)
        return int(highest)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            if number == signal.SIGINT and time.monotonic() - self._signalled_at > _SECOND_INTERRUPT:
                raise Stopped(number)
            return
        self._signal, self._signalled_at = number, time.monotonic()
        if self._may_abandon:
            self._watch = threading.Timer(self._grace, self._abandon)
            self._watch.daemon = True
            self._watch.start()

    def _abandon(self) -> None:
        """End the process: the step that was under way when the signal came is still not done."""
        assert self._signal is not None
        try:
            if self._on_abandon is not None:
                name = signal.Signals(self._signal).name
                step = f"a step of more than {self._grace:g} s"
                self._on_abandon(f"stopped by {name} in {step}; the last checkpoint counts")
        except Exception as error:  # such as a full disk: reported, and no reason to stay
            print(f"error: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(128 + self._signal if self._signal == signal.SIGINT else 0)


def _default_grace() -> float:
    """Seconds after a signal until a run abandons the step that it is in: 5 before torchrun kills it, in which it says
    so, or half the time where there is little."""
    try:
        killed_after = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", ""))  # as torchrun reads it
    except ValueError:
        killed_after = 0
    if killed_after <= 0:
        killed_after = _KILLED_AFTER
    return max(killed_after - 5.0, killed_after / 2)
