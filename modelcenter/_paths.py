"""Paths of the shipped data (inside `modelcenter/` in the wheel, beside the package in a checkout), suggestions for
mistyped paths, and atomic writes."""

import difflib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def model_configs_dir() -> Path:
    """The folder of model presets, `<family>/<name>.json`."""
    return _shipped("model_configs")


def scripts_dir() -> Path:
    """The folder of scripts, recipes and sample data."""
    return _shipped("scripts")


def nearest_beside(path: Path) -> str:
    """For a path that does not exist: a sentence that suggests a similar name in the same folder; empty if there is
    none."""
    names: list[str] = []
    with suppress(OSError):
        names = [other.name for other in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, 1, 0.7)
    return f" Did you mean {str(path.with_name(close[0]))!r}?" if close else ""


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Add the path to the error of a full disk or quota, which names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: if the disk is full, the process is killed or the power fails, it keeps its old content.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    work = path.with_name(f".{path.name}")
    try:
        with naming_full_disk(path):
            with work.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # else the new name could reach the disk before the content
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
