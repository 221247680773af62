"""The file that a verb writes its result to, or standard output."""

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
    """Raise OSError before the work is done if its result could not be written, and ValueError if its format is not
    known. endings: of files that the result can be written to."""
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
    """Write rows to a file, in the format that its ending names, or to standard output as JSON lines; returns how many
    they were. See write_lines."""
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
    """Write lines to a file, which is there when it is whole, or to standard output; returns how many they were.

    A device or a pipe (/dev/null, /dev/stderr, the shell's >(gzip > x)) is written to as it is.
    """
    if path is None:
        return _write(sys.stdout, lines)
    with _whole_file(path, mode="w", encoding="utf-8") as file:
        return _write(file, lines)


@contextmanager
def _whole_file(path: str, **how: Any) -> Iterator[Any]:
    """A file to write to, which is at its place when it is whole. how: of open."""
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
    """The file that a path means: where it is a link, what that leads to, so that the link stays."""
    given = Path(expanduser(path)).absolute()
    return given if _is_stream(given) else Path(os.path.realpath(given))


def _is_stream(path: Path) -> bool:
    """Whether it is there and is no file that another could take the place of."""
    return path.exists() and not path.is_file()


def _write(file: TextIO, lines: Iterable[str]) -> int:
    return sum(bool(file.write(line + "\n")) for line in lines)
