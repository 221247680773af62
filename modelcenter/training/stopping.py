"""Stopping a run cleanly, on a signal or when its time is up, as all ranks agree."""

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

_SECOND_INTERRUPT = 1.0  # seconds after which another SIGINT is a second Ctrl-C: launchers also forward the first
_KILLED_AFTER = 30  # seconds between a signal and the launcher's SIGKILL, unless torchrun was told otherwise
_TIME_IS_UP = 1 << 10  # a reason to stop, greater than every signal's number


class Stopping:
    """A context manager: the first SIGTERM, SIGUSR1 or SIGINT, or the end of the time, stops the run after a step.

    Only the main thread receives signals. SIGINT stays ignored where it was. A second SIGINT raises Stopped at once. If
    a step takes longer than launchers wait, the process ends in the middle of it, and the run resumes from its newest
    complete checkpoint.

    Attributes:
        reason: why the run stops, once all ranks have agreed on that; None: it does not stop.
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
            grace: seconds that a step may take after a signal; None: a little less than torchrun waits.
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
            numbers = [signal.SIGTERM]
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in a script's background job: not its Ctrl-C
                numbers.append(signal.SIGINT)
            if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):  # submitit, e.g., has a handler
                numbers.append(signal.SIGUSR1)  # SLURM is often told to send it
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_of_steps()
        for number, handler in self._previous_handlers.items():
            # A handler that was not installed from Python (None) cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def end_of_steps(self) -> None:
        """Do not abandon the run from now on: the work after the last step may use all of the launcher's patience."""
        self._may_abandon = False
        if self._watch is not None:
            self._watch.cancel()

    def should_stop(self) -> bool:
        """Whether the run must end now; the same on all ranks. Collective."""
        time_is_up = self._deadline is not None and time.monotonic() > self._deadline
        code = self._max_over_ranks(self._signal or (_TIME_IS_UP if time_is_up else 0))
        if code and self.reason is None:
            self.reason = "max_time passed" if code == _TIME_IS_UP else f"stopped by {signal.Signals(code).name}"
            self._signal = None if code == _TIME_IS_UP else code
            if self._watch is not None:
                self._watch.cancel()
        return self.reason is not None

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank. Collective."""
        return bool(self._max_over_ranks(int(value)))

    def raise_if_interrupted(self) -> None:
        """Raise Stopped after SIGINT, which is an error to a shell; SIGTERM and the end of the time are planned."""
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
        """End the process, because the step in which the signal came is still running."""
        assert self._signal is not None
        try:
            if self._on_abandon is not None:
                name = signal.Signals(self._signal).name
                step = f"a step of more than {self._grace:g} s"
                self._on_abandon(f"stopped by {name} in {step}; the run resumes from its last checkpoint")
        except Exception as error:  # such as a full disk, which must not keep the process alive
            print(f"error: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(128 + self._signal if self._signal == signal.SIGINT else 0)


def _default_grace() -> float:
    """Seconds from a signal until a run abandons its current step: 5 less than torchrun waits, in which the run can
    report that, or half if torchrun waits only briefly."""
    try:
        killed_after = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", ""))  # as torchrun reads it
    except ValueError:
        killed_after = 0
    if killed_after <= 0:
        killed_after = _KILLED_AFTER
    return max(killed_after - 5.0, killed_after / 2)
