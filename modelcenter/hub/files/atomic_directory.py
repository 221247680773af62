"""Directories that are whole or absent: filled beside their place, and renamed when complete."""

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

# Of a distributed checkpoint, beside what every model has: it goes with the manifest, without which these names may be
# anybody's.
_PARTS = ("model", "optim", "state", RUN_FILE, GENERATOR_FILE)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target` to fill; it takes the place of `target` when the block ends, or vanishes if it fails.

    An existing `target` loses the config and weights of an earlier checkpoint, if the new directory is one. Its other
    files stay unless the new directory has them: a tokenizer saved there before, a card, logs.

    Raises:
        ValueError: the place cannot be written, another process is saving there, or `target` is not a directory that
            may be replaced.
    """
    target = checked_target(target)
    scratch = target.parent / f".{target.name}.saving-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = target.parent / f".{target.name}.saving"
            stack.enter_context(locked(lock, f"cannot save to {target}: another process is saving there"))
            for left in target.parent.glob(f".{glob.escape(target.name)}.saving-*"):  # of a process that was killed
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
        ValueError: it is something that must not be replaced.
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
    """Give a finished directory the name `target`, once all of it is on the disk; see new_directory.

    Raises:
        OSError: nothing was changed. ValueError: it has its name, but the disk did not take that, or a file of the old
            one could not be moved to it.
    """
    if not target.exists():
        sync_to_disk(scratch)
        scratch.rename(target)
        _keep_name(target)
        return
    place = target.parent / f".{target.name}.exchanged-{secrets.token_hex(4)}"
    _mark(place, scratch).touch()
    sync_to_disk(scratch)
    with suppress(OSError):  # file systems without permissions
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
            f"{target} is complete, but {error.filename} could not be moved to it: {error.strerror}. What is missing "
            f"there is in {old}; the next save tries again"
        ) from error


def _keep_name(target: Path) -> None:
    """Bring the name of a directory to the disk: a save that has returned, or removes what was there, is to outlive a
    power cut. Raises ValueError: the disk fails."""
    try:
        fsync(target.parent)
    except OSError as error:
        raise ValueError(f"{target} is complete, but its disk may not keep it: {error.strerror}") from error


def _mark(place: Path, directory: Path) -> Path:
    """A file of the new one of two directories that exchange their names by way of `place`.

    After a kill it tells which of them has this name: the numbers of directories do not, as some file systems number
    anew what is renamed. It begins with a period, so that no upload takes it along.
    """
    return directory / place.name


def _exchange(scratch: Path, target: Path, place: Path) -> bool:
    """Let the two exchange their names at once, so that readers always find one of them; the old one is at `place`.

    False, with nothing changed but the mark gone, if the system has no such step, or does not allow it.
    """
    exchanged = None
    try:
        scratch.rename(place)
        exchanged = exchange_names(place, target)
    except OSError:
        pass  # the renames may be allowed, or say what is wrong
    finally:
        if exchanged is None:  # an interruption, for one, may also come when they are exchanged
            exchanged = place.exists() and not _mark(place, place).exists()
        if not exchanged and place.exists():
            place.rename(scratch)
    if not exchanged:
        _mark(place, scratch).unlink()
    return exchanged


def finish_replacing(target: Path) -> None:
    """Finish what put_in_place began in a process that was killed.

    Where it had not named the new directory yet, the old one keeps its name or gets it back; else its files that stay
    move over.
    """
    for left in target.parent.glob(f".{glob.escape(target.name)}.discarded-*"):
        shutil.rmtree(left, ignore_errors=True)
    replaced = [*target.parent.glob(f".{glob.escape(target.name)}.replaced-*")]
    for place in target.parent.glob(f".{glob.escape(target.name)}.exchanged-*"):
        if _mark(place, place).exists():  # the new one: they were not exchanged
            _discard(place, target)
        else:
            replaced.append(place)
    for old in replaced:
        if target.exists():
            _carry_over(old, target)
        else:
            old.rename(target)


def _carry_over(old: Path, target: Path) -> None:
    """Move to `target` the files of the directory that it replaced, but those of its checkpoint; remove the rest."""
    _mark(old, target).unlink(missing_ok=True)
    new = {path.name for path in target.iterdir()}
    # Beside an adapter all of it stays.
    parts = _PARTS if (old / MANIFEST_FILE).is_file() and is_replaced(MANIFEST_FILE, new) else ()
    for path in old.iterdir():
        if path.name not in new and path.name not in parts and not is_replaced(path.name, new):
            path.rename(target / path.name)
    _discard(old, target)


def _discard(path: Path, target: Path) -> None:
    """Remove a directory beside `target`, under a name that says so: half removed, nothing would tell what it was."""
    discarded = path.with_name(f".{target.name}.discarded-{secrets.token_hex(4)}")
    path.rename(discarded)
    shutil.rmtree(discarded, ignore_errors=True)
