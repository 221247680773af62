"""The lock of an output folder: two runs in one folder would remove and overwrite each other's checkpoints."""

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from modelcenter.hub.files.locks import is_same_file, try_lock

_FILE = ".lock"
_PATIENCE = 120.0  # seconds for which a file server may keep the lock of a dead node


@contextmanager
def lock_folder(folder: Path, patience: float = _PATIENCE) -> Iterator[None]:
    """Inside, keep other runs out of a folder. The system releases the lock when the process ends, however it ends.

    Without effect if the file system has no locks.

    Args:
        patience: seconds to wait for a lock of another node, which may have died.

    Raises:
        ValueError: another process writes to the folder.
    """
    path, node, deadline = folder / _FILE, platform.node(), time.monotonic() + patience
    while True:
        folder.mkdir(parents=True, exist_ok=True)  # the run that had the lock may have removed the folder
        file = path.open("a+b", buffering=0)
        locked = _lock(file)
        if locked and is_same_file(path, file.fileno()):
            break
        file.seek(0)
        holder = file.read().decode("utf-8", "replace") or "another process"
        file.close()
        if locked:
            continue
        if holder.endswith(f" on {node}") or time.monotonic() > deadline:
            raise ValueError(
                f"output_dir: {holder} is training in {folder}; wait until it ends, or give another folder"
            )
        time.sleep(0.5)
    with file:
        with suppress(OSError):  # such as a full disk: the text is only for messages
            file.truncate(0)
            file.write(f"process {os.getpid()} on {node}".encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock(file: BinaryIO) -> bool:
    """Try to lock the file, and return whether that worked. The lock belongs to this process only: children that
    outlive it do not keep it."""
    return try_lock(lambda: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
