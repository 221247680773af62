"""The lock of an output folder: two runs in it would remove and overwrite each other's checkpoints."""

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
_PATIENCE = 120.0  # seconds for which a file server may keep the lock of a node that has died


@contextmanager
def lock_folder(folder: Path, patience: float = _PATIENCE) -> Iterator[None]:
    """Keep other runs out of a folder while inside. The system releases the lock when the process ends, however it
    ends.

    Where the file system has no locks, nobody is kept out.

    Args:
        patience: seconds to wait for a lock of another node, which may have died.

    Raises:
        ValueError: another process writes to the folder.
    """
    path, node, deadline = folder / _FILE, platform.node(), time.monotonic() + patience
    while True:
        folder.mkdir(parents=True, exist_ok=True)  # who had the lock may have failed, and removed the empty folder
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
                f"output_dir: {holder} is training in {folder}; wait until it has ended, or give another folder"
            )
        time.sleep(0.5)
    with file:
        with suppress(OSError):  # a full disk: what is written is for people
            file.truncate(0)
            file.write(f"process {os.getpid()} on {node}".encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock(file: BinaryIO) -> bool:
    """Whether nobody else has the file. The lock is of this process alone: children that outlive it do not keep it."""
    return try_lock(lambda: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
