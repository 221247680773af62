"""Reporting errors that the user can correct: one line, exit code 2."""

import codecs
import json
import os
import re
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from typing import Any

from modelcenter.command_line.launcher import launched_rank


class Stopped(Exception):
    """The run was asked to end: SIGTERM or SIGINT."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")


_SHOW_ANYWAY = "modelcenter.show-anyway"  # how standard output encodes characters that its encoding lacks
_REPEAT_AFTER = 0.02  # seconds, in which the code that dropped a Ctrl-C ends
_HEAD_START = 10.0  # seconds for the rank with the most informative error to report it, before the launcher ends all


@contextmanager
def user_errors(traceback: bool = False) -> Iterator[None]:
    """Turn ValueError, OSError and similar errors into `error: ...` on stderr and exit code 2.

    Other errors keep their traceback, and so do these with MODELCENTER_TRACEBACK=1 (or traceback=True). If every rank
    fails alike, only rank 0 reports the error: the others wait until the launcher ends them. An error of a single rank
    is reported with its number. A rank that failed only because it lost another one also waits before its traceback.
    Ctrl-C, also in code that drops exceptions, or a closed pipe for the output (`| head`), ends the program without a
    message. A UserWarning becomes a line that starts with `warning:`, without its place in the code. At the end, output
    has been flushed, or an error is reported.
    """
    _reopen_closed_streams()
    usual, warnings.formatwarning = warnings.formatwarning, _format_warning
    usual_hook = sys.unraisablehook
    sys.unraisablehook = partial(_keep_interrupts, usual_hook)
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
            if "gloo/transport/" in str(error):  # another rank has failed; its error is the one to read
                time.sleep(_HEAD_START)
            raise
        rank = launched_rank()
        if rank:
            time.sleep(_HEAD_START)
        error = _naming_output(error, _discard_unwritable_output())
        print(f"{f'[rank {rank}] ' if rank else ''}error: {_printable(_text(error))}", file=sys.stderr, flush=True)
        raise SystemExit(128 + error.signal_number if isinstance(error, Stopped) else 2) from None
    finally:
        warnings.formatwarning = usual
        sys.unraisablehook = usual_hook


@contextmanager
def flag_in_errors(field: str) -> Iterator[None]:
    """Prefix a ValueError raised inside with the flag it concerns, unless it already names one."""
    try:
        yield
    except ValueError as error:
        if re.match(r"\w+: ", str(error)):
            raise
        raise ValueError(f"{field}: {error}") from error


def _keep_interrupts(usual_hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Repeat a Ctrl-C that came in code whose exceptions Python prints and drops, such as a callback of its imports."""
    if unraisable.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident or 0
        again = threading.Timer(_REPEAT_AFTER, signal.pthread_kill, (main_thread, signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        usual_hook(unraisable)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if category is UserWarning:
        return f"warning: {_printable(str(message))}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _encode_anyway(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encode characters that the output's encoding lacks (Chinese in Latin-1, half a surrogate pair).

    Bytes of file names that are not UTF-8 are written unchanged. Other characters are written as JSON escapes, so that
    a line of JSON keeps its meaning.
    """
    assert isinstance(error, UnicodeEncodeError)
    first = error.object[error.start]
    if 0xDC80 <= ord(first) <= 0xDCFF:  # as os.fsdecode represents them
        return bytes([ord(first) - 0xDC00]), error.start + 1
    return json.dumps(first)[1:-1], error.start + 1


codecs.register_error(_SHOW_ANYWAY, _encode_anyway)


def _reopen_closed_streams() -> None:
    """Reopen standard streams that the caller closed (`>&-`, some daemons), which are None in Python, on /dev/null."""
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


def _discard_unwritable_output() -> int | None:
    """Flush standard output; if it cannot be written, discard what is left and return the number of the error."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _redirect_to_null(sys.stdout.fileno())
        return error.errno
    except ValueError:  # the program closed it
        pass
    return None


def _naming_output(error: Exception, unwritable: int | None) -> Exception:
    """The error, with a name if it is that of standard output, which has none ("No space left on device")."""
    if isinstance(error, OSError) and error.filename is None and unwritable is not None and error.errno == unwritable:
        return OSError(error.errno, error.strerror, "standard output")
    return error


def _redirect_to_null(out: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), out)  # otherwise Python complains at exit


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe without a reader; if so, its buffer is discarded."""
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
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":  # of torch and tokenizers
        encoding = sys.getfilesystemencoding()
        other = f"set PYTHONUTF8=1, because this locale's encoding is {encoding}"
        name = error.object.encode("utf-8", "backslashreplace").decode()
        return f"{name}: not valid UTF-8; {'rename it' if encoding == 'utf-8' else other}"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _printable(text: str) -> str:
    """A message with terminal control characters escaped, because it may quote a file from the Hub."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)
