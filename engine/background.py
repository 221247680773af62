"""Writing in a thread while training goes on."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

from engine import runtime

_log = logging.getLogger("engine.checkpoint")


class Background(threading.Thread):
    """A thread that runs ``work``, which writes what ``name`` says; ``finish`` raises its error.

    The error is logged as well, because a program may end without calling ``finish``. The thread is not a daemon, so
    the interpreter waits for it. Once ``work`` is over, neither the thread nor the error keeps alive what was written.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name)
        self._work = work
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            _forget_frames(error)
            self._error = error
            if runtime.rank() == 0:  # every rank raises the error of the one that failed
                _log.error("%s could not be written: %s", self.name, error)
        finally:
            del self._work

    def finish(self) -> None:
        """Wait for the work, and raise its error if it failed."""
        self.join()
        if self._error is not None:
            raise self._error


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes: a writer's frames hold everything that it had to write."""
    errors, seen = [error], set()
    while errors:
        if (error := errors.pop()) is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            errors += [error.__cause__, error.__context__]
