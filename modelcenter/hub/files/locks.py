"""Locks on files, by which processes keep each other out of a place. The system lets go of them when a process ends."""

import errno
import os
from collections.abc import Callable
from pathlib import Path


def free(take: Callable[[], None]) -> bool:
    """Whether nobody else has the file that `take` locks. Where the file system has no locks, nobody is kept out."""
    try:
        take()
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def is_at(path: Path, handle: int) -> bool:
    """Whether a file that was opened is still the one there: the process that had it may have removed it since."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
