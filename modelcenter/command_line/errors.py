"""How a program of ours ends when the user can mend what went wrong: one line, exit code 2."""

import os
import re
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper


class Stopped(Exception):
    """The run was asked to end: SIGTERM or SIGINT."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")


_HEAD_START = 10.0  # seconds that the rank whose error says most gets to speak for all, until the launcher ends them


@contextmanager
def user_errors(traceback: bool = False) -> Iterator[None]:
    """Turn ValueError, OSError and their like into `error: ...` on stderr and exit code 2.

    MODELCENTER_TRACEBACK=1 (or traceback=True) lets them pass, as do all other errors. Where every rank fails alike
    only rank 0 speaks: the others wait, and by then the launcher has ended them; what only one rank saw is said with
    its number. A rank that only lost another waits, too, before its traceback. Ctrl-C, and a reader of the output that
    is gone (`| head`), end it without a word. A UserWarning is a line that starts with `warning:`, without the place in
    the code. What was printed has been written when this ends, or it is said why it could not be.
    """
    _open_what_is_closed()
    usual, warnings.formatwarning = warnings.formatwarning, _format_warning
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files that are not UTF-8 are shown as they are
    shown = traceback or os.environ.get("MODELCENTER_TRACEBACK", "") not in ("", "0")
    try:
        with _written():
            yield
    except KeyboardInterrupt:
        if shown:
            raise
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            raise SystemExit(128 + signal.SIGPIPE) from None
        from_user = isinstance(error, (ValueError, OSError, FloatingPointError, Stopped))
        if shown or not from_user:
            if "gloo/transport/" in str(error):  # another rank is gone, whose error is the one to read
                time.sleep(_HEAD_START)
            raise
        rank = int(os.environ.get("RANK") or 0)
        if rank:
            time.sleep(_HEAD_START)
        print(f"{f'[rank {rank}] ' if rank else ''}error: {_text(error)}", file=sys.stderr, flush=True)
        _drop_what_cannot_be_written()
        raise SystemExit(128 + error.signal_number if isinstance(error, Stopped) else 2) from None
    finally:
        warnings.formatwarning = usual


@contextmanager
def flag_in_errors(field: str) -> Iterator[None]:
    """Let a ValueError inside say which flag it is about, unless it names one itself."""
    try:
        yield
    except ValueError as error:
        if re.match(r"\w+: ", str(error)):
            raise
        raise ValueError(f"{field}: {error}") from error


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if category is UserWarning:
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _open_what_is_closed() -> None:
    """Standard streams that the caller closed (`>&-`, some daemons) are None for Python: let them lead nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


@contextmanager
def _written() -> Iterator[None]:
    """Write what is left of standard output; Python does so when it ends, but can only complain by then."""
    try:
        yield
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _drop_what_cannot_be_written() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _lead_nowhere(sys.stdout.fileno())
    except ValueError:  # the program closed it
        pass


def _lead_nowhere(out: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), out)  # else Python complains when it ends


def _reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads; then what it still holds goes nowhere."""
    try:
        out = sys.stdout.fileno()
    except OSError:  # not a file
        return False
    poll = select.poll()
    poll.register(out, 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        _lead_nowhere(out)
    return gone


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
