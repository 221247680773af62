"""The file that a verb writes its result to, or standard output."""

import errno
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO


def check_output(path: str | None) -> None:
    """Raise OSError before the work is done if its result could not be written."""
    if path is not None and int(os.environ.get("RANK") or 0) == 0:
        target = _target(path)
        if target.is_dir():
            raise OSError(f"output: {path} is a directory; give the name of a file, such as {Path(path) / 'out.jsonl'}")
        try:
            if _is_stream(target):
                if not os.access(target, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                return
            with tempfile.TemporaryFile(dir=target.parent):
                pass
        except OSError as error:
            raise OSError(f"output: cannot write {path}: {error.strerror}") from None


def write_lines(path: str | None, lines: Iterable[str]) -> int:
    """Write lines to a file, which is there when it is whole, or to standard output; returns how many they were.

    A device or a pipe (/dev/null, /dev/stderr, the shell's >(gzip > x)) is written to as it is.
    """
    if path is None:
        return _write(sys.stdout, lines)
    target = _target(path)
    if _is_stream(target):
        with target.open("w", encoding="utf-8") as file:
            return _write(file, lines)
    work = target.with_name(f".{target.name}.writing")
    try:
        with work.open("w", encoding="utf-8") as file:
            written = _write(file, lines)
        work.rename(target)
    finally:
        work.unlink(missing_ok=True)
    return written


def _target(path: str) -> Path:
    """The file that a path means: where it is a link, what that leads to, so that the link stays."""
    given = Path(path).expanduser().absolute()
    return given if _is_stream(given) else Path(os.path.realpath(given))


def _is_stream(path: Path) -> bool:
    """Whether it is there and is no file that another could take the place of."""
    return path.exists() and not path.is_file()


def _write(file: TextIO, lines: Iterable[str]) -> int:
    return sum(bool(file.write(line + "\n")) for line in lines)
