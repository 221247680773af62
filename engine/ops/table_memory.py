"""Large blocks of CPU memory that an embedding table or a vocabulary head needs in each step, kept for the next step.

A batch looks up a few hundred rows of a table that may be most of a model, but its gradient is as large as the table.
malloc maps blocks above 32 MB anew each time, and the kernel clears their pages on first touch: for 47 MB this takes
five to thirty times as long as writing zeros into mapped memory. So the memory of a gradient, or of a chunk of logits,
is kept as long as the table exists, and reused once no tensor uses it any more (after ``zero_grad``).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from engine.ops import zero_pages
from engine.torch_compat import in_function_transform

LARGE = 32 << 20  # bytes: the largest blocks that glibc can be told to keep when they are freed


class KeptMemory:
    """Blocks of memory for tensors of one purpose.

    Args:
        blocks: how many are kept at most. While all are in use, tensors get ordinary memory.
    """

    def __init__(self, blocks: int) -> None:
        self._most, self._lock = blocks, threading.Lock()
        self._blocks: list[_Block] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor, in the memory of an earlier one if no tensor uses that any more."""
        return self._take(shape, dtype, lambda size: torch.empty(size, dtype=torch.uint8).numpy())

    def take_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As `take`, filled with zeros; pages that are never written take no memory."""
        return zero_pages.clear_(self._take(shape, dtype, zero_pages.zero_bytes))

    def _take(self, shape: Sequence[int], dtype: torch.dtype, new: Callable[[int], np.ndarray]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size < LARGE or (dist.is_initialized() and dist.get_world_size() > 1):
            # A sharded model has whole tables only for a moment, and the ranks of a machine share its memory.
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            # A free block that is too small was for a smaller batch: it makes room for a larger one.
            self._blocks = [block for block in self._blocks if block.in_use() or block.size >= size]
            free = [block for block in self._blocks if not block.in_use()]
            if not free:
                if len(self._blocks) >= self._most:
                    return torch.empty(shape, dtype=dtype)
                free = [_Block(new(size))]
                self._blocks += free
            return free[0].lend(shape, dtype)


class _Block:
    def __init__(self, memory: np.ndarray) -> None:
        self.size, self._bytes = memory.nbytes, memory
        self._lent: weakref.ref[Any] | None = None

    def in_use(self) -> bool:
        return self._lent is not None and self._lent() is not None

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # A storage keeps its array alive as long as a tensor uses it. Autograd accumulates in place only in a tensor
        # that is no view and whose storage Python has not seen.
        array = self._bytes[: math.prod(shape) * dtype.itemsize]
        self._lent = weakref.ref(array)
        return torch.frombuffer(array, dtype=dtype).resize_(shape)


class TableMemory:
    """The memory that is kept for one table.

    Attributes:
        gradients: two blocks of the table's size: autograd adds the gradient of a microbatch to that of earlier ones.
        logits: one block for the logits of a chunk of rows.
    """

    def __init__(self) -> None:
        self.gradients, self.logits = KeptMemory(2), KeptMemory(1)


_memories = WeakTensorKeyDictionary()


def is_plain_table(table: Tensor) -> bool:
    """Whether a table is a parameter on a CPU, not computed or split from one, outside torch.compile and torch.func."""
    if type(table) is not nn.Parameter or not table.is_cpu:
        return False
    return not (torch.compiler.is_compiling() or in_function_transform())


def table_memory(table: Tensor) -> TableMemory | None:
    """The memory of a plain, contiguous and large table; None for others."""
    if table.nbytes < LARGE or not is_plain_table(table) or not table.is_contiguous():
        return None
    memory: TableMemory = _memories.setdefault(table, TableMemory())
    return memory
