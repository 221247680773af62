"""File locks that keep other processes out of a place. The system releases them when a process ends."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def try_lock(take: Callable[[], None]) -> bool:
    """Call `take`, which locks a file. False if another process holds it; True if the file system has no locks."""
    try:
        take()
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def is_same_file(path: Path, handle: int) -> bool:
    """Whether an open file is still the one at `path`: the process that held it may have removed it since."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def locked(path: Path, message: str) -> Iterator[None]:
    """Keep other processes out of the block, by a lock on a file that exists only meanwhile.

    The system releases it when the process and all that it forked meanwhile have ended, however they end.

    Raises:
        ValueError: another process holds it; the text is `message`. OSError: the file cannot be created there.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as refused:
        try:
            handle = os.open(path, os.O_RDONLY)  # another user's, whose process may be running or was killed
        except FileNotFoundError:  # it is the folder that is not writable
            raise refused from None
    if not (try_lock(lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)) and is_same_file(path, handle)):
        os.close(handle)
        raise ValueError(message)
    try:
        yield
    finally:
        try:
            with suppress(PermissionError):  # another user's, in a folder in which only the owner may remove a file
                path.unlink(missing_ok=True)
        finally:  # an interruption must not leave this process holding the lock
            os.close(handle)
