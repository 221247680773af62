"""Writing the result of a verb to a file or to standard output."""

import errno
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import Any, TextIO

from modelcenter._paths import naming_full_disk
from modelcenter.command_line.launcher import launched_rank
from modelcenter.training.inference.row_formats import ENDINGS, LINES, Row, format_of, text_lines, write_parquet


def check_output(path: str | None, endings: Sequence[str] = ENDINGS) -> None:
    """Raise OSError early if the result cannot be written to the path, and ValueError if the format is unknown.
    endings: the file endings that are supported."""
    if path is not None and launched_rank() == 0:
        target = _target(path)
        if target.is_dir():
            raise OSError(f"output: {path} is a directory; give the name of a file, such as {Path(path) / 'out.jsonl'}")
        format_of(path, endings)
        try:
            if _is_stream(target):
                if not os.access(target, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                return
            with tempfile.TemporaryFile(dir=target.parent):
                pass
        except OSError as error:
            raise OSError(f"output: cannot write {path}: {error.strerror}") from None


def write_rows(path: str | None, rows: Iterable[Row]) -> int:
    """Write rows to a file, in the format of its ending, or to standard output as JSON lines, and return their number.
    See write_lines."""
    ending = LINES if path is None else format_of(path)
    if ending == LINES:
        return write_lines(path, text_lines(rows, ending))
    rows = list(rows)
    if ending == ".parquet":
        with _whole_file(str(path), mode="wb") as file:
            write_parquet(rows, file)
    else:
        write_lines(path, text_lines(rows, ending))
    return len(rows)


def write_lines(path: str | None, lines: Iterable[str]) -> int:
    """Write lines to a file, which appears only when it is complete, or to standard output, and return their number.

    A device or a pipe (/dev/null, /dev/stderr, the shell's >(gzip > x)) is written to directly.
    """
    if path is None:
        return _write(sys.stdout, lines)
    with _whole_file(path, mode="w", encoding="utf-8") as file:
        return _write(file, lines)


@contextmanager
def _whole_file(path: str, **how: Any) -> Iterator[Any]:
    """A file to write to, which appears at `path` when it is complete. how: arguments of open."""
    target = _target(path)
    if _is_stream(target):
        with naming_full_disk(target), target.open(**how) as file:
            yield file
        return
    work = target.with_name(f".{target.name}.writing")
    try:
        with naming_full_disk(target), work.open(**how) as file:
            yield file
        work.rename(target)
    finally:
        work.unlink(missing_ok=True)


def _target(path: str) -> Path:
    """The target of a path: links are followed, so that they are not replaced."""
    given = Path(expanduser(path)).absolute()
    return given if _is_stream(given) else Path(os.path.realpath(given))


def _is_stream(path: Path) -> bool:
    """Whether the path exists and is not a regular file, and so cannot be replaced."""
    return path.exists() and not path.is_file()


def _write(file: TextIO, lines: Iterable[str]) -> int:
    return sum(bool(file.write(line + "\n")) for line in lines)
