"""How a command reports an error that the user can correct: one line, exit code 2."""

import codecs
import json
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

from modelcenter.command_line.launcher import launched_rank


class Stopped(Exception):
    """The run was asked to end: SIGTERM or SIGINT."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")


_SHOW_ANYWAY = "modelcenter.show-anyway"  # how standard output encodes what its encoding lacks
_HEAD_START = 10.0  # seconds for the rank with the most telling error to report it, until the launcher ends all ranks


@contextmanager
def user_errors(traceback: bool = False) -> Iterator[None]:
    """Turn ValueError, OSError and their like into `error: ...` on stderr and exit code 2.

    Other errors keep their traceback, and so do these with MODELCENTER_TRACEBACK=1 (or traceback=True). Where every
    rank fails alike only rank 0 reports it: the others wait, and the launcher ends them meanwhile; an error of one rank
    alone is reported with its number. A rank that only lost another one also waits before its traceback. Ctrl-C, and a
    reader of the output that is gone (`| head`), end the program without a message. A UserWarning is a line that starts
    with `warning:`, without the place in the code. At the end the output has been flushed, or an error tells why not.
    """
    _reopen_closed_streams()
    usual, warnings.formatwarning = warnings.formatwarning, _format_warning
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors=_SHOW_ANYWAY)
    shown = traceback or os.environ.get("MODELCENTER_TRACEBACK", "") not in ("", "0")
    try:
        with _flushed_output():
            yield
    except KeyboardInterrupt:
        if shown:
            raise
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            raise SystemExit(128 + signal.SIGPIPE) from None
        from_user = isinstance(error, (ValueError, OSError, FloatingPointError, Stopped))
        if shown or not from_user:
            if "gloo/transport/" in str(error):  # another rank is gone, whose error is the one to read
                time.sleep(_HEAD_START)
            raise
        rank = launched_rank()
        if rank:
            time.sleep(_HEAD_START)
        print(f"{f'[rank {rank}] ' if rank else ''}error: {_printable(_text(error))}", file=sys.stderr, flush=True)
        _discard_unwritable_output()
        raise SystemExit(128 + error.signal_number if isinstance(error, Stopped) else 2) from None
    finally:
        warnings.formatwarning = usual


@contextmanager
def flag_in_errors(field: str) -> Iterator[None]:
    """Prefix a ValueError raised inside with the flag that it is about, unless it names one itself."""
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
        return f"warning: {_printable(str(message))}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _encode_anyway(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encode characters that an output has no bytes for (Chinese in a locale of Latin 1, half a surrogate pair).

    Bytes of a file's name that are not UTF-8 are shown as they are; the rest by JSON's escapes, so that a line of JSON
    means what it did.
    """
    assert isinstance(error, UnicodeEncodeError)
    first = error.object[error.start]
    if 0xDC80 <= ord(first) <= 0xDCFF:  # as os.fsdecode makes them
        return bytes([ord(first) - 0xDC00]), error.start + 1
    return json.dumps(first)[1:-1], error.start + 1


codecs.register_error(_SHOW_ANYWAY, _encode_anyway)


def _reopen_closed_streams() -> None:
    """Open standard streams that the caller closed (`>&-`, some daemons), which are None in Python, on /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


@contextmanager
def _flushed_output() -> Iterator[None]:
    """Flush standard output at the end: when Python does so at exit, the program can no longer report a failure."""
    try:
        yield
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _discard_unwritable_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _redirect_to_null(sys.stdout.fileno())
    except ValueError:  # the program closed it
        pass


def _redirect_to_null(out: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), out)  # or Python complains at exit


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads; if so, what it still holds is discarded."""
    try:
        out = sys.stdout.fileno()
    except OSError:  # not a file
        return False
    poll = select.poll()
    poll.register(out, 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        _redirect_to_null(out)
    return gone


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _printable(text: str) -> str:
    """A message with what would control the terminal as escapes: it may quote what a file from the Hub holds."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)
