"""Writing files past the page cache.

A checkpoint is written at once, synced at once and seldom read soon. Through the page cache, the kernel finds memory
for it and copies it. On a virtual machine whose free memory goes back to its host this took 2.3 s of a core per GB, of
which training beside a save is short; writing directly to the disk takes 0.1 s, and a save less than half of the time.

Only local file systems are written to directly: over a network, the cache is what keeps several requests on their way.
Exports and conversions are not either: they are often read at once, and reading them from the disk costs what writing
them directly gains.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK = 4096  # bytes: direct writes start and end at multiples, in the file and in memory; no local disk asks for more
_ROOM = 8 * 2**20  # bytes of a direct write; with half of this, the time between two writes shows
_LEAST = 2**20  # bytes below which the page cache costs less than waiting for the disk
_CACHED = (
    2**18
)  # bytes of a cached write; for more the kernel looks for memory in large pieces, which may cost ten times
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "overlay")  # overlay: a container's layers, on one of the others


@functools.cache
def _is_local(device: int) -> bool:
    """Whether the file system with this device number is one of `_LOCAL`."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()]
    except OSError:  # not Linux
        return False
    fields = next((fields for fields in mounts if fields[2] == number), None)
    return fields is not None and fields[fields.index("-") + 1] in _LOCAL


def _open_direct(path: Path) -> int | None:
    """A descriptor for direct writes to an existing file; None where they do not pay or are not possible.

    MODELCENTER_DIRECT_IO=0 or 1 overrides the choice of file systems.
    """
    flag, choice = getattr(os, "O_DIRECT", 0), os.environ.get("MODELCENTER_DIRECT_IO")
    if not flag or choice == "0" or not (choice == "1" or _is_local(path.stat().st_dev)):
        return None
    try:
        return os.open(path, os.O_WRONLY | flag)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return None
        raise


class DirectWriter(io.RawIOBase):
    """A new file, written from its first byte to its last, as a file object for `torch.save`. A context manager.

    Bytes are collected, hashed and written in large pieces. `close` syncs the file; after an error in the context the
    file is left as it is.

    Attributes:
        sha256: of the whole file, once it is closed.

    Raises:
        OSError: the file cannot be opened, written or synced.
    """

    def __init__(self, path: Path):
        self._room = np.frombuffer(mmap.mmap(-1, _ROOM, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        self._written = self._collected = 0  # bytes in the file and in the room
        self._digest = hashlib.sha256()
        self.sha256 = ""
        self._cached: int | None = None
        self._direct: int | None = None
        try:
            self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._direct = _open_direct(path)
        except BaseException:
            self._release()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether full pieces go past the page cache."""
        return self._direct is not None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written + self._collected

    def write(self, data: Any, /) -> int:
        left = np.frombuffer(data, np.uint8)
        count = len(left)
        while len(left):
            part = left[: _ROOM - self._collected]
            self._room[self._collected : self._collected + len(part)] = part  # without the interpreter's lock
            self._collected += len(part)
            left = left[len(part) :]
            if self._collected == _ROOM:
                self._put()
        return count

    def _put(self) -> None:
        """Write what has been collected."""
        data = self._room.data[: self._collected]
        self._digest.update(data)
        while len(data):
            data = data[self._write_some(data) :]
        self._collected = 0

    def _write_some(self, data: memoryview) -> int:
        """Write a part of the data, of which the end of a file is no whole block; returns its size."""
        assert self._cached is not None
        whole = len(data) // _BLOCK * _BLOCK
        if self._direct is not None and whole >= _LEAST:
            try:
                count = os.pwrite(self._direct, data[:whole], self._written)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)  # the disk's blocks are larger
                self._direct = None
                return 0
        else:
            count = os.pwrite(self._cached, data[:_CACHED], self._written)
        self._written += count
        return count

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._put()
            assert self._cached is not None
            os.fsync(self._cached)
            self.sha256 = self._digest.hexdigest()
        finally:
            self._release()

    def _release(self) -> None:
        super().close()
        for handle in (self._cached, self._direct):
            if handle is not None:
                os.close(handle)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        elif not self.closed:
            self._release()
