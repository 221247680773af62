"""Zeros on a CPU that take memory only where they are written.

Linux maps all pages that a process reads but has not written to the same page of zeros. So a tensor that is mostly
zeros, such as the gradient or the moments of an embedding table of which few rows are looked up, takes memory only for
its other pages, and its zeros need not be loaded into the caches. The compiled operators (csrc/cpu) leave zeros
unwritten; without them the functions below return ordinary memory.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.ops import library

_LARGE = 1 << 20  # bytes: looking at the rows of smaller tensors does not pay
_LOOKED_AT, _AT_FIRST = 1024, 32  # rows in a sample, and in a first, smaller one


def zero_bytes(size: int) -> np.ndarray:
    """`size` zeros (uint8) that take no memory yet. Pages are small, because a 2 MB page would hold many rows."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of zeros, with at least one element, that takes no memory yet."""
    return torch.frombuffer(zero_bytes(math.prod(shape) * dtype.itemsize), dtype=dtype).resize_(shape)


def clear_(x: Tensor) -> Tensor:
    """`x.zero_()` for a contiguous CPU tensor, without writing to pages that are zero already."""
    if not library.cpu().loaded:
        return x.zero_()
    torch.ops.modelcenter.clear_pages_(x)
    return x


def mostly_zero_rows(x: Tensor) -> bool:
    """Whether at least half of the rows of a large contiguous CPU tensor are zero, estimated from a sample."""
    if not x.is_cpu or x.ndim < 2 or x.nbytes < _LARGE or not x.is_contiguous() or not library.cpu().loaded:
        return False
    sample = x[:: max(1, len(x) // _LOOKED_AT)].flatten(1)
    if sample[:: max(1, len(sample) // _AT_FIRST)].any(1).all():  # typical of other tensors: stop early
        return False
    return 2 * int(sample.any(1).sum()) <= len(sample)


def copy_of(x: Tensor) -> Tensor:
    """A contiguous copy on the CPU; if most rows of x are zero, these zeros take no memory."""
    if not mostly_zero_rows(x):
        return torch.empty_like(x, device="cpu").copy_(x)
    copy = zeros(x.shape, x.dtype)
    torch.ops.modelcenter.copy_pages_(copy, x.detach())
    return copy
