"""Memory: settings of the C allocator and of torch's caches, the peak of a process, and byte counts as text."""

import ctypes
import gc
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCHES = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",  # of torch's layer between itself and oneDNN
}


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks of up to 32 MB instead of returning them to the system. Returns whether it did.

    A training step frees and allocates the same buffers again and again. By default they go back to the system whenever
    the end of the heap is free, and the kernel zeroes every page on first touch: a fifth of a small model's CPU step.
    With this setting the resident size stays near its peak until the process ends, so it is for programs that train,
    not for a library to set on import. Larger blocks are still mapped anew each time, because a fragmented heap has no
    room left for them and would grow by such a block in every step. `prepare_torch` makes that cheaper, and
    `engine.ops.table_memory` keeps the largest: the gradient of a vocabulary's table, and its logits.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h
    return bool(mallopt(mmap_threshold, 32 << 20)) and bool(mallopt(trim_threshold, 2**31 - 1))  # the most it takes


def prepare_torch() -> bool:
    """Set environment variables that torch's CPU libraries read once, on first use. Returns whether it did.

    Programs call this before they import torch; later it would have no effect, and nothing is set. Variables that the
    user has set are kept.

    - Pages of 2 MB for blocks of 2 MB and more, where Linux offers them on request: a new block then takes one page
      fault per 2 MB instead of 512, a fifth of the time (measured for 47 MB on a virtual machine).
    - 128 cached plans of matrix products instead of 1,024 in each of two caches. oneDNN compiles code for each shape of
      a product, half a megabyte each, and packed batches have a new number of tokens in almost every step. Where no
      compiled operator of this project multiplies, the caches would grow by some 10 MB a step, although entries are
      rarely reused beyond the step, which has some 30 shapes.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return False
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
    return True


@contextmanager
def left_uncollected() -> Iterator[None]:
    """For the start of a program: switch off Python's garbage collector inside, and exempt from later collections
    whatever exists at the end. It would traverse a million objects of imported modules again and again, a sixth of the
    time to the first step.

    Does nothing if torch is imported already, because other code's objects would be exempted too.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def peak_resident() -> int:
    """Peak resident memory of this process so far, in bytes; pages of mapped files count too."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def readable(count: float) -> str:
    """A number of bytes in decimal units, as disks, the Hub and file listings give them: "1.23 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
