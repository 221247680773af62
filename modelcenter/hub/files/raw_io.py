"""Reading and writing files at given positions, and the memory of tensors as bytes."""

import os
from pathlib import Path

import torch

MAX_WRITE = 2**18  # bytes; a larger write makes the kernel allocate memory in large pieces, which may take 10x as long


def read_at(file: Path, handle: int, target: memoryview, start: int) -> None:
    """Fill `target` from byte `start` on. One call may return fewer bytes, for example from a network file system."""
    done = 0
    while done < len(target):
        count = os.preadv(handle, [target[done:]], start + done)
        if count == 0:
            raise ValueError(f"{file} ended at byte {start + done}, but {len(target) - done} more were needed")
        done += count


def write_at(handle: int, data: memoryview, start: int) -> None:
    """Write bytes at a position of a file.

    At most MAX_WRITE at a time: for more, the kernel allocates memory in one large piece, which may take it several
    times as long as the copy.
    """
    while len(data):
        count = os.pwrite(handle, data[:MAX_WRITE], start)
        data, start = data[count:], start + count


def allocate_file(path: Path, size: int, head: bytes = b"") -> None:
    """Create a file at its full size, with `head` at its start. Raises OSError if the disk is too full for it.

    `head` is written first, so that a file of full size has a valid start even if the allocation, which may take
    minutes, is interrupted.
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
    """The memory of a contiguous CPU tensor. (A single element is contiguous whatever its strides are.)"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return flat_bytes(tensor).numpy().data
