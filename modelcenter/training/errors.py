"""How a program of ours ends when the user can mend what went wrong: one line, exit code 2."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopped(Exception):
    """The run was asked to end: SIGTERM or SIGINT."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")


_HEAD_START = 10.0  # seconds that rank 0 gets to speak for all ranks


@contextmanager
def user_errors(traceback: bool = False) -> Iterator[None]:
    """Turn ValueError, OSError and their like into `error: ...` on stderr and exit code 2.

    MODELCENTER_TRACEBACK=1 (or traceback=True) lets them pass, as do all other errors. Where every rank fails alike
    only rank 0 speaks: the others wait, and by then the launcher has ended them; what only one rank saw is said with
    its number.
    """
    try:
        yield
    except Exception as error:
        from_user = isinstance(error, (ValueError, OSError, FloatingPointError, Stopped))
        if traceback or os.environ.get("MODELCENTER_TRACEBACK", "") not in ("", "0") or not from_user:
            raise
        rank = int(os.environ.get("RANK") or 0)
        if rank:
            time.sleep(_HEAD_START)
        print(f"{f'[rank {rank}] ' if rank else ''}error: {_text(error)}", file=sys.stderr, flush=True)
        raise SystemExit(128 + error.signal_number if isinstance(error, Stopped) else 2) from None


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
