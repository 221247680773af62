"""Positioned reads and writes of files, and the memory of tensors as bytes."""

import os
from pathlib import Path

import torch

MAX_WRITE = 2**18  # bytes; for larger writes the kernel looks for memory in large pieces, which may cost ten times more


def read_at(file: Path, handle: int, target: memoryview, start: int) -> None:
    """Fill `target` from byte `start` on: one call may give less, as of files over a network."""
    done = 0
    while done < len(target):
        count = os.preadv(handle, [target[done:]], start + done)
        if count == 0:
            raise ValueError(f"{file} ended at byte {start + done} while {len(target) - done} more were needed")
        done += count


def write_at(handle: int, data: memoryview, start: int) -> None:
    """Write bytes to their place in a file.

    No more at once than the kernel takes in without looking for memory in one large piece, which costs it many times
    what the copy does.
    """
    while len(data):
        count = os.pwrite(handle, data[:MAX_WRITE], start)
        data, start = data[count:], start + count


def allocate_file(path: Path, size: int, head: bytes = b"") -> None:
    """Make a file at its full size, with what it starts with. Raises OSError where the disk is too full for it.

    A file that has its size begins right: an interruption falls behind the allocation, which may take minutes.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_at(handle, memoryview(head), 0)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        elif size:  # macOS
            os.ftruncate(handle, size)
    finally:
        os.close(handle)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous CPU tensor. (One of a single element is contiguous whatever its strides say.)"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return flat_bytes(tensor).numpy().data
