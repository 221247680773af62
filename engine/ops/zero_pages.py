"""Zeros on a CPU that take memory only where they are written.

Linux gives a process the same page of zeros for everything that it reads and has not written. So of a tensor that is
mostly zeros, such as the gradient and the moments of a table of embeddings of which texts look up some rows, only the
rest takes memory, and the zeros need not be brought into the caches. The compiled operators (csrc/cpu) leave zeros
unwritten; without them all of this gives ordinary memory.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.ops import library

_LARGE = 1 << 20  # bytes: smaller tensors are not worth a look at their rows
_LOOKED_AT, _AT_FIRST = 1024, 32  # rows


def zero_bytes(size: int) -> np.ndarray:
    """That many zeros (uint8), none of which takes memory yet; in small pages, as one of 2 MB has many a row."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without large pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of zeros, of at least one element, none of which takes memory yet."""
    return torch.frombuffer(zero_bytes(math.prod(shape) * dtype.itemsize), dtype=dtype).resize_(shape)


def clear_(x: Tensor) -> Tensor:
    """`x.zero_()` of a contiguous tensor on a CPU, which leaves pages of zeros as they are."""
    if not library.cpu().loaded:
        return x.zero_()
    torch.ops.modelcenter.clear_pages_(x)
    return x


def mostly_zero_rows(x: Tensor) -> bool:
    """Whether at least half of the rows of a large contiguous tensor on a CPU are zeros, by a sample of them."""
    if not x.is_cpu or x.ndim < 2 or x.nbytes < _LARGE or not x.is_contiguous() or not library.cpu().loaded:
        return False
    sample = x[:: max(1, len(x) // _LOOKED_AT)].flatten(1)
    if sample[:: max(1, len(sample) // _AT_FIRST)].any(1).all():  # as of what is no table: it is not read as a whole
        return False
    return 2 * int(sample.any(1).sum()) <= len(sample)


def copy_of(x: Tensor) -> Tensor:
    """A contiguous copy on a CPU; of one of mostly zero rows, the zeros take no memory."""
    if not mostly_zero_rows(x):
        return torch.empty_like(x, device="cpu").copy_(x)
    copy = zeros(x.shape, x.dtype)
    torch.ops.modelcenter.copy_pages_(copy, x.detach())
    return copy
