"""Memory: settings of the C allocator and of torch's caches, what a process has used, and byte counts as text."""

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
    "LRU_CACHE_CAPACITY": "128",  # of what torch puts between itself and oneDNN
}


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks of up to 32 MB instead of returning them to the system. Returns whether it did.

    A training step frees and asks for the same buffers again and again. By default they go back to the system whenever
    the end of the heap is free, and the kernel zeroes every page at its first touch: a fifth of a small model's CPU
    step. The process's resident size then stays near its peak until it ends, so this is for programs that train, not
    for a library to do on import. Larger blocks are mapped anew each time: a heap that other blocks cut up has no room
    for them where they were, and would grow by one of them a step. `prepare_torch` makes that cheaper, and the largest,
    the gradient of a vocabulary's table and its logits, are kept by `engine.ops.table_memory`.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h
    return bool(mallopt(mmap_threshold, 32 << 20)) and bool(mallopt(trim_threshold, 2**31 - 1))  # more it refuses


def prepare_torch() -> bool:
    """Set, in the environment, what torch's CPU libraries read once, at their first use. Returns whether it did.

    For programs to call before they import torch: later it would change nothing, and is left. What the user has set
    stays.

    - Pages of 2 MB for blocks of 2 MB and more, where Linux has them for who asks: a new block then costs a fault for
      2 MB in place of 512 of them, a fifth of the time, measured for 47 MB on a virtual machine.
    - 128 kept plans of products, in place of 1,024 in each of two caches. oneDNN makes code for each shape of a
      product, half a megabyte of it, and packed batches have another number of tokens in almost every step: so,
      where no compiled operator multiplies, the caches grow by some 10 MB a step, and are hardly read but within a
      step, which has some 30 shapes.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return False
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
    return True


@contextmanager
def left_uncollected() -> Iterator[None]:
    """For the start of a program: Python's garbage collection does not run inside, and from then on leaves alone what
    there is. It would go through a million objects of modules again and again, a sixth of the time to a first step.

    Does nothing where torch is imported already, for then objects of others would be left alone too.
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
    """The most bytes of memory that this process has had so far; pages of files it has mapped count too."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def readable(count: float) -> str:
    """A number of bytes in decimal units, as disks, the Hub and file listings give them: "1.23 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
