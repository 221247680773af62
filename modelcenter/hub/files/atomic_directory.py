"""Replacing a directory atomically: it is filled next to the old one, and renamed when complete."""

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from os.path import expanduser
from pathlib import Path

from engine.checkpoint.files import exchange_names, fsync, is_irreplaceable, rename_both, sync_to_disk
from modelcenter.hub.files.locks import locked
from modelcenter.hub.files.names import GENERATOR_FILE, MANIFEST_FILE, RUN_FILE, is_replaced

# Files that only distributed checkpoints have. A save removes them only if they come with a manifest: without one,
# files of these names may be the user's own.
_PARTS = ("model", "optim", "state", RUN_FILE, GENERATOR_FILE)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory next to `target` to fill; it replaces `target` when the block ends, or is removed if the block fails.

    An existing `target` loses the config and weights of an earlier checkpoint, if the new directory is one. Its other
    files stay unless the new directory has them: a tokenizer saved there before, a card, logs.

    Raises:
        ValueError: the location is not writable, another process is saving there, or `target` must not be replaced.
    """
    target = checked_target(target)
    scratch = target.parent / f".{target.name}.saving-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = target.parent / f".{target.name}.saving"
            stack.enter_context(locked(lock, f"cannot save to {target}: another process is saving there"))
            for left in target.parent.glob(f".{glob.escape(target.name)}.saving-*"):  # of a killed process
                shutil.rmtree(left, ignore_errors=True)
            finish_replacing(target)
            scratch.mkdir()
        except OSError as error:
            raise ValueError(f"cannot save to {target}: {error.strerror or error} ({error.filename})") from error
        try:
            yield scratch
            put_in_place(scratch, target)
        except OSError as error:
            why = error.strerror or error
            raise ValueError(f"saving to {target} failed: {why}; nothing was changed there") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def checked_target(target: Path) -> Path:
    """The absolute path of a directory to make or replace.

    Raises:
        ValueError: it must not be replaced.
    """
    target = Path(expanduser(target))
    target = target.resolve() if target.exists() else target.absolute()
    if target.exists() and not target.is_dir():
        raise ValueError(f"cannot save to {target}: it is a file, expected a directory or a new name")
    if target.exists() and not os.access(target, os.W_OK | os.X_OK):
        raise ValueError(f"cannot save to {target}: it is read-only; change its mode or name another directory")
    if is_irreplaceable(target):
        raise ValueError(
            f"cannot save to {target}: it is the current directory, one above it, or a mount point; name one inside"
        )
    return target


def put_in_place(scratch: Path, target: Path) -> None:
    """Rename a finished directory to `target`, once all of it is on the disk; see new_directory.

    Raises:
        OSError: nothing was changed. ValueError: it was renamed, but the disk may not keep the name, or a file of the
            old directory could not be moved to it.
    """
    if not target.exists():
        sync_to_disk(scratch)
        scratch.rename(target)
        _keep_name(target)
        return
    place = target.parent / f".{target.name}.exchanged-{secrets.token_hex(4)}"
    _mark(place, scratch).touch()
    sync_to_disk(scratch)
    with suppress(OSError):  # some file systems have no permissions
        shutil.copymode(target, scratch)
    old = place
    if not _exchange(scratch, target, place):
        old = target.parent / f".{target.name}.replaced-{secrets.token_hex(4)}"
        rename_both(scratch, target, old)
    _keep_name(target)
    try:
        _carry_over(old, target)
    except OSError as error:
        raise ValueError(
            f"{target} is complete, but {error.filename} could not be moved to it: {error.strerror}. The missing "
            f"files are in {old}; the next save tries again"
        ) from error


def _keep_name(target: Path) -> None:
    """Flush the name of a directory to the disk: it must survive a power cut before a save returns or removes the old
    directory. Raises ValueError if the disk fails."""
    try:
        fsync(target.parent)
    except OSError as error:
        raise ValueError(f"{target} is complete, but its disk may not keep it: {error.strerror}") from error


def _mark(place: Path, directory: Path) -> Path:
    """A file in the new one of two directories that exchange their names via `place`.

    After a kill it tells which of them has this name. Inode numbers do not, because some file systems renumber a
    renamed directory. Its name begins with a period, so no upload includes it.
    """
    return directory / place.name


def _exchange(scratch: Path, target: Path, place: Path) -> bool:
    """Exchange the names of the two in one step, so that readers always find one of them; the old one is then `place`.

    Returns False, with nothing changed except that the mark is removed, if the system cannot exchange names.
    """
    exchanged = None
    try:
        scratch.rename(place)
        exchanged = exchange_names(place, target)
    except OSError:
        pass  # the caller's renames may still work, or they report the cause
    finally:
        if exchanged is None:  # e.g. an interruption, which may also come after the exchange
            exchanged = place.exists() and not _mark(place, place).exists()
        if not exchanged and place.exists():
            place.rename(scratch)
    if not exchanged:
        _mark(place, scratch).unlink()
    return exchanged


def finish_replacing(target: Path) -> None:
    """Finish what put_in_place began in a process that was killed.

    If the new directory had not been renamed yet, the old one keeps its name or gets it back; otherwise the files to
    keep are moved over from it.
    """
    for left in target.parent.glob(f".{glob.escape(target.name)}.discarded-*"):
        shutil.rmtree(left, ignore_errors=True)
    replaced = [*target.parent.glob(f".{glob.escape(target.name)}.replaced-*")]
    for place in target.parent.glob(f".{glob.escape(target.name)}.exchanged-*"):
        if _mark(place, place).exists():  # it is the new one: the names were not exchanged
            _discard(place, target)
        else:
            replaced.append(place)
    for old in replaced:
        if target.exists():
            _carry_over(old, target)
        else:
            old.rename(target)


def _carry_over(old: Path, target: Path) -> None:
    """Move the files of a replaced directory to `target`, except those of its checkpoint; remove the rest."""
    _mark(old, target).unlink(missing_ok=True)
    new = {path.name for path in target.iterdir()}
    # An adapter replaces no checkpoint: all files stay.
    parts = _PARTS if (old / MANIFEST_FILE).is_file() and is_replaced(MANIFEST_FILE, new) else ()
    for path in old.iterdir():
        if path.name not in new and path.name not in parts and not is_replaced(path.name, new):
            path.rename(target / path.name)
    _discard(old, target)


def _discard(path: Path, target: Path) -> None:
    """Remove a directory next to `target`, renaming it first: a half-removed directory must not be taken for a save."""
    discarded = path.with_name(f".{target.name}.discarded-{secrets.token_hex(4)}")
    path.rename(discarded)
    shutil.rmtree(discarded, ignore_errors=True)
