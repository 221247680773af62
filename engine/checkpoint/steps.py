"""A directory of many checkpoints, one for each saved step.

::

    step-00000100/    complete or absent, see engine.checkpoint
    last, best        links, or files with a name: the newest checkpoint, and the one saved with best=True
"""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path

from engine import runtime
from engine.checkpoint.files import MANIFEST, STEP, check_manifest, is_complete, named_checkpoint, remove_directory
from engine.collectives import from_rank_0, together


def latest_checkpoint(directory: str | os.PathLike[str], verify: bool = False) -> Path | None:
    """The newest valid checkpoint: ``directory`` itself, or the highest step-... in it; None if there is none.

    Collective. ``directory`` may also be the "best" or "last" of such a directory, a link or a file
    (``named_checkpoint``). Broken checkpoints are skipped with a warning that says what is wrong; one that is still
    being written does not count.

    Args:
        verify: compare the files' sha256, too, not only their sizes.

    Raises:
        ValueError: ``directory`` names a single checkpoint, which is broken.
    """
    return newest(Path(directory).absolute(), verify)[0]


def newest(root: Path, verify: bool) -> tuple[Path | None, list[str]]:
    """(the path of ``latest_checkpoint``, what is wrong with each checkpoint that was skipped)."""
    found: Path | None = None
    broken: list[str] = []
    with together(f"looking for checkpoints in {root}"):
        if runtime.rank() == 0:
            root = named_checkpoint(root)
            if (root / MANIFEST).exists():
                check_manifest(root, hashes=verify)
                found = root
            for _, path in [] if found else _steps(root):
                try:
                    check_manifest(path, hashes=verify)
                except ValueError as error:
                    warnings.warn(f"checkpoint passed over: {error}", stacklevel=3)
                    broken.append(str(error))
                    continue
                found = path
                break
    place, broken = from_rank_0((found and str(found), broken))
    return place and Path(place), broken


def finish_save(
    directory: str | os.PathLike[str], step: int, *, best: int | None = None, keep: int | None = None
) -> None:
    """Update "last" and "best" and remove old checkpoints, as a save does after completing its checkpoint. Collective.

    For a run that resumes from a checkpoint whose save was killed before that.

    Args:
        directory: holds many checkpoints. step: that of the newest. best: the step that ``best`` shall name, if it is
            still there; None: ``best`` is unchanged. keep: as in ``save_checkpoint``.
    """
    root = Path(directory).absolute()
    with together(f"clearing up in {root}"):
        if runtime.rank() == 0:
            clear_up(root, step, best, keep)


def clear_up(root: Path, step: int, best: int | None, keep: int | None) -> None:
    """The last part of a save, after its checkpoint is complete; see ``finish_save``."""
    try:
        _name(root / "last", path_of(root, step))
        if best is not None and path_of(root, best).is_dir():
            _name(root / "best", path_of(root, best))
    finally:
        _purge(root, step, keep)


def _name(link: Path, target: Path) -> None:
    """Let ``link`` name its sibling ``target``, atomically; see ``named_checkpoint``."""
    new = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}")  # removed by _purge if this fails
    try:
        new.symlink_to(target.name)
    except OSError:
        new.write_text(target.name, encoding="utf-8")
    os.replace(new, link)


def _purge(root: Path, step: int, keep: int | None) -> None:
    for left in [*root.glob(".step-*.partial-*"), *root.glob(".step-*.old-*")]:  # left by a run that was killed
        remove_directory(left)
    for left in [*root.glob(".last.*"), *root.glob(".best.*")]:  # left by a _name that failed or was killed
        left.unlink(missing_ok=True)
    if keep is None:
        return
    best = named_checkpoint(root / "best").resolve()
    earlier = [path for number, path in _steps(root) if number <= step]
    whole = 0
    for path in earlier:
        if whole < keep:
            whole += is_complete(path)  # a broken one must not displace a complete one
        elif path.resolve() != best:
            gone = path.with_name(f".{path.name}.old-{uuid.uuid4().hex[:8]}")
            path.rename(gone)  # so that a half-removed directory never looks like a checkpoint
            remove_directory(gone)


def path_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _steps(root: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints in ``root``, including broken ones, the highest step first."""
    if not root.is_dir():
        return []
    found = [(match, path) for path in root.iterdir() if (match := STEP.fullmatch(path.name)) and path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in found), reverse=True)
