"""Memory: the C allocator's habits, and how a number of bytes is written."""

import ctypes
import platform


def keep_freed_memory() -> bool:
    """Tell glibc to keep large freed blocks instead of returning them to the system. Returns whether it did.

    A training step frees and asks for the same large buffers again and again. By default each of them is mapped anew
    and the kernel zeroes every page at its first touch: a fifth of a small model's CPU step. The process's resident
    size then stays at its peak until it ends, so this is for programs that train, not for a library to do on import.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, mmap_max = -1, -4  # from malloc.h
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


def readable(count: float) -> str:
    """A number of bytes in decimal units, as disks, the Hub and file listings give them: "1.23 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
