"""The folder of a run: whether the run may write to it, and clearing what an earlier run left. For rank 0."""

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modelcenter.hub.files.names import GENERATOR, RUN_FILE

CHECKPOINTS = "checkpoints"
_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "skipped.jsonl",
    "samples.jsonl",
    "summary.json",
    "curves.png",
    "model",
    "adapter",
    GENERATOR,
    CHECKPOINTS,
    "tracking",
)


@contextmanager
def remove_if_empty(path: Path) -> Iterator[None]:
    """Afterwards, remove a folder and its parents if they were created inside and are empty."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty, or has not been made
            for folder in missing:
                folder.rmdir()


def prepare_output(path: Path, overwrite: bool) -> None:
    """Check that a run can write to a folder, before anything slow starts, and create it.

    Raises:
        ValueError: it is a file, or holds a finished run (without `overwrite`), foreign files or a broken link.
        OSError: it cannot be written.
    """
    if path.is_dir():
        summary = path / "summary.json"
        foreign = [] if _is_run(path) else [entry.name for entry in path.iterdir() if not _may_be_there_before(entry)]
        if foreign:
            raise ValueError(
                f"output_dir: {path} has files that are not from a run ({foreign[0]}, ...); give a new folder"
            )
        if not overwrite and _status(summary) == "finished":
            raise ValueError(
                f"output_dir: {path} has a finished run; give another folder (with --resume {shlex.quote(str(path))} "
                "to train it further), or --overwrite_output_dir"
            )
    if path.is_file():
        raise ValueError(f"output_dir: {path} is a file, expected a folder or a new name")
    for link in (path / name for name in _FILES):
        if link.is_symlink() and not link.exists():
            raise ValueError(
                f"output_dir: {link} is a link to {link.readlink()}, which does not exist; create that folder"
            )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(f"output_dir: cannot write to {path}: {error.strerror}") from None


def _is_run(path: Path) -> bool:
    """Whether a run wrote the folder. A config.yaml or model/ does not prove it: they may be the user's own, and must
    not be removed."""
    if any((path / CHECKPOINTS).glob(f"step-*/{RUN_FILE}")):  # users may copy only the checkpoints from another disk
        return True
    return (path / "metrics.jsonl").is_file() or (path / "summary.json").is_file()


def _may_be_there_before(entry: Path) -> bool:
    """Whether an entry may be in a folder that no run has written to."""
    if entry.name in _FILES and entry.is_dir() and (entry.is_symlink() or not any(entry.iterdir())):
        return True  # made by the user, perhaps as a link to another disk
    return entry.name.startswith(".") or _is_log(entry)


def _is_log(path: Path) -> bool:
    """Whether a shell or a queue wrote the command's own output to it: log, train.log, nohup.out, slurm-7.err."""
    return path.name.rpartition(".")[2] in ("log", "out", "err") and path.is_file()


def clear_output(path: Path) -> None:
    """Remove the files of an earlier run when a new one starts; other files stay."""
    for name in _FILES:
        _empty(path / name)


def _empty(path: Path) -> None:
    """Remove a file or a folder. If it is a link to a folder, perhaps on another disk, empty that folder instead."""
    if path.is_symlink() and path.is_dir():
        for entry in path.iterdir():
            _remove(entry)  # links too, such as `last` and those to checkpoints that are kept elsewhere
    else:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _status(summary: Path) -> str | None:
    try:
        return json.loads(summary.read_text(encoding="utf-8")).get("status")
    except (OSError, ValueError, AttributeError, RecursionError):  # not JSON, or no mapping
        return None


def free_space(path: Path) -> str:
    """The free space on a folder's disk, in words."""
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:  # such as a folder that is gone
        return f"{path}: {error.strerror}"
    return f"{free / 1e6:,.1f} MB are free at {path}"
