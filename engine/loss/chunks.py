"""The logits of a vocabulary's head for a chunk of rows at a time, and the gradients that come of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss.vocabulary import VocabularyShard
from engine.ops import library, matmul, matmul_nt
from engine.ops.autocast import product_dtype
from engine.ops.table_memory import table_memory

# Bytes of one chunk of logits. Larger gains nothing on a CPU once the matrix product is efficient.
_CHUNK_BYTES = 64 << 20
# On a GPU each chunk reads the weight twice and its gradient once, and writes that: below about 250 rows this takes
# longer than the arithmetic (H200: 790 TFLOP/s against 4.3 TB/s), so a chunk has many times as many. The fewer chunks,
# the less often the weight's gradient is rounded, which is added up in its own dtype. A product's tile has 128 rows.
_GPU_CHUNK_BYTES, _GPU_ROWS, _TILE = 512 << 20, 1024, 128
# cuBLAS has its fast kernels for matrices whose rows begin at multiples of 16 bytes: for a vocabulary of 50,257 the
# others take 2.5 times as long. So such a vocabulary gets classes of zeros, until rows of logits, in 16 bits, are whole
# lines of a cache. That copies the weight, which takes as long as is gained with some 50 rows in training, 100 without.
_ALIGNED_BYTES, _WHOLE_LINES, _WIDENED_ROWS = 16, 64, 256


class ChunkedHead:
    """hidden (n, hidden_size) @ weight (classes, hidden_size).T + bias outside autograd, a chunk of rows at a time.

    Args:
        fused: the loss and its gradient are `cross_entropy_`'s, which takes no memory where it is compiled. torch's
            operators work on two more sets of logits, in fp32.
        cap: a logit x is cap tanh(x / cap); None: it is as it comes.

    Attributes:
        chunks: all rows.
        classes: that the weight has. Logits have further columns, for classes of zeros, where that is faster.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shard: VocabularyShard | None,
        fused: bool = True,
        cap: float | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.classes = hidden, weight, bias, weight.shape[0]
        self._cap = cap
        number = hidden.shape[0]
        rows = _rows_of(number, weight, shard, fused and cap is None)
        self.chunks = [slice(start, start + rows) for start in range(0, number, rows)]
        self.wide_weight, self._wide_bias = widened(hidden, weight, bias)
        self._room = _logits_room(min(rows, number), self.wide_weight)

    def logits(self, chunk: slice) -> Tensor:
        """(rows, classes and classes of zeros) fp32, bf16 or fp16; in the memory of the chunk before on a CPU. Those
        that are capped are fp32."""
        hidden = self.hidden[chunk]
        room = None if self._room is None else self._room[: len(hidden)]
        logits = matmul_nt(hidden, self.wide_weight, self._wide_bias, room)
        if self._cap is not None:
            return logits.float().div_(self._cap).tanh_().mul_(self._cap)
        return logits.float() if logits.dtype == torch.float64 else logits

    def slopes(self, logits: Tensor) -> Tensor | None:
        """What the gradient of such logits is multiplied by on its way through the cap; None: there is no cap."""
        return None if self._cap is None else (logits / self._cap).square_().neg_().add_(1)


class HeadGradients:
    """The gradients of a head's hidden states, weight and bias, of those that are wanted: one of a frozen head beside
    an adapter costs nothing. Under tensor parallelism that of the hidden states is this rank's part of it."""

    def __init__(self, head: ChunkedHead, wanted: Sequence[bool]) -> None:
        self._head, self._weight_wanted = head, wanted[1]
        hidden, weight, bias = head.hidden, head.weight, head.bias
        several = len(head.chunks) > 1
        self._hidden = torch.empty_like(hidden) if wanted[0] else None
        # No rows: the gradient is zero, but weight still takes part (another rank may have rows).
        self._weight = torch.zeros_like(weight) if wanted[1] and not head.chunks else None
        self._weight_dtype = _sum_dtype(weight, several)
        memory = table_memory(head.wide_weight) if wanted[1] and weight.dtype == torch.float32 else None
        self._room = None if memory is None else memory.gradients.take(weight.shape, weight.dtype)
        self._bias = None
        if wanted[2] and bias is not None:
            self._bias = torch.zeros_like(bias, dtype=_sum_dtype(bias, several))

    def add(self, chunk: slice, grad: Tensor, slopes: Tensor | None) -> None:
        """grad: of the chunk's logits, zero in the classes of zeros; it may be overwritten. slopes: of the logits."""
        hidden = self._head.hidden[chunk]
        grad = grad if slopes is None else grad.mul_(slopes)
        grad = grad.to(hidden.dtype)
        if self._hidden is not None:
            self._hidden[chunk] = matmul(grad, self._head.wide_weight)
        if self._weight_wanted:
            total = matmul(grad.t(), hidden, add_to=self._weight, room=self._room)
            self._weight = total.to(self._weight_dtype)
        if self._bias is not None:
            self._bias += grad[:, : self._head.classes].sum(0, dtype=self._bias.dtype)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those of hidden, weight and bias."""
        head, weight = self._head, self._weight
        if weight is not None and weight.shape[0] != head.classes:
            weight = weight[: head.classes]
        return self._hidden, _in_dtype_of(head.weight, weight), _in_dtype_of(head.bias, self._bias)


def _rows_per_chunk(weight: Tensor, shard: VocabularyShard | None, fused: bool) -> int:
    """How many rows may have their logits in memory at once; the same number on every rank."""
    held = weight.shape[0] if shard is None else shard.most
    if weight.device.type == "cuda":
        alone = fused and shard is None and library.serves(weight.device)
        most = max(_GPU_ROWS, _GPU_CHUNK_BYTES // ((weight.element_size() if alone else 8) * held))
        return -(-most // _TILE) * _TILE
    return max(1, _CHUNK_BYTES // (4 * _aligned(held)))


def _rows_of(rows: int, weight: Tensor, shard: VocabularyShard | None, fused: bool) -> int:
    """How many of so many rows are a chunk. On a GPU, where there are few chunks, they are of one size."""
    most = _rows_per_chunk(weight, shard, fused)
    if weight.device.type != "cuda" or rows <= most:
        return most
    equal = -(-rows // -(-rows // most))
    return min(most, -(-equal // _TILE) * _TILE)


def _classes_with_zeros(hidden: Tensor, classes: int) -> int:
    """How many classes the products of hidden (..., hidden_size) with a weight of so many are to have."""
    width = hidden.shape[-1] if hidden.dim() else 1
    if hidden.device.type != "cuda" or torch.compiler.is_compiling() or hidden.numel() < _WIDENED_ROWS * width:
        return classes  # generation asks for a few rows at a time
    if hidden.dtype == torch.float64 or classes * product_dtype(hidden).itemsize % _ALIGNED_BYTES == 0:
        return classes
    return -(-classes // _WHOLE_LINES) * _WHOLE_LINES


def widened(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """weight and bias as the products with hidden take them: with zeros behind the classes where that is faster."""
    more = _classes_with_zeros(hidden, weight.shape[0]) - weight.shape[0]
    if not more:
        return weight, bias
    return F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))


def _aligned(classes: int) -> int:
    """From how many numbers on the next row begins, at a multiple of 64 bytes."""
    return -(-classes // 16) * 16


def _logits_room(rows: int, weight: Tensor) -> Tensor | None:
    """(rows, classes): memory for one chunk of fp32 logits after the other on a CPU, where new memory costs a tenth of
    the product, and rows that are not aligned a quarter."""
    if not library.plain_fp32(weight) or not rows:
        return None
    classes, memory = weight.shape[0], table_memory(weight)
    shape = rows, _aligned(classes)
    room = weight.new_empty(shape) if memory is None else memory.logits.take(shape, weight.dtype)
    return room[:, :classes]


def _sum_dtype(x: Tensor, several: bool) -> torch.dtype:
    """In what the chunks' parts of the gradient of x are added up: in 16 bits each sum would be rounded, and stop
    growing. A matrix on a GPU is left at that: its chunks are large, so few, and its gradient in fp32 would be too.
    """
    if not several or (x.device.type == "cuda" and x.dim() > 1):
        return x.dtype
    return torch.promote_types(x.dtype, torch.float32)


def _in_dtype_of(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if parameter is None or gradient is None else gradient.to(parameter.dtype)
