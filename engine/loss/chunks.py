"""The logits of a vocabulary head, one chunk of rows at a time, and the head's gradients from those of the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss.vocabulary import VocabularyShard
from engine.ops import library, matmul, matmul_nt
from engine.ops.autocast import product_dtype
from engine.ops.table_memory import table_memory

# Bytes of one chunk of logits. Larger chunks gain nothing on a CPU once the matrix product is efficient.
_CHUNK_BYTES = 64 << 20
# On a GPU each chunk reads the weight twice, and reads and writes its gradient: below about 250 rows this takes longer
# than the arithmetic (H200: 790 TFLOP/s against 4.3 TB/s), so chunks have many times as many rows. Fewer chunks also
# round the weight's gradient less often, which is accumulated in its own dtype. A tile of a product has 128 rows.
_GPU_CHUNK_BYTES, _GPU_ROWS, _TILE = 512 << 20, 1024, 128
# cuBLAS has fast kernels for matrices whose rows begin at multiples of 16 bytes; for a vocabulary of 50,257 the others
# take 2.5 times as long. Such a vocabulary is padded with classes of zeros until 16-bit rows of logits are whole cache
# lines. This copies the weight, which takes the time that is gained with some 50 rows in training, 100 without.
_ALIGNED_BYTES, _WHOLE_LINES, _WIDENED_ROWS = 16, 64, 256


class ChunkedHead:
    """hidden (n, hidden_size) @ weight (classes, hidden_size).T + bias without autograd, one chunk of rows at a time.

    Args:
        fused: loss and gradient are computed by `cross_entropy_`, which needs no further memory if it is compiled;
            torch's operators need two more fp32 copies of the logits.
        cap: logits x become cap tanh(x / cap); None: no cap.

    Attributes:
        chunks: slices that cover all rows.
        classes: those of the weight. If it is faster, logits have further columns for classes of zeros.
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
        """(rows, classes and classes of zeros), fp32, bf16 or fp16, and fp32 if capped. On a CPU they use the memory of
        the previous chunk."""
        hidden = self.hidden[chunk]
        room = None if self._room is None else self._room[: len(hidden)]
        logits = matmul_nt(hidden, self.wide_weight, self._wide_bias, room)
        if self._cap is not None:
            return logits.float().div_(self._cap).tanh_().mul_(self._cap)
        return logits.float() if logits.dtype == torch.float64 else logits

    def slopes(self, logits: Tensor) -> Tensor | None:
        """The derivative of the cap at these (capped) logits; None: there is no cap."""
        return None if self._cap is None else (logits / self._cap).square_().neg_().add_(1)


class HeadGradients:
    """The gradients of a head's hidden states, weight and bias, as far as they are wanted: a frozen head costs nothing.
    Under tensor parallelism the gradient of the hidden states is this rank's addend."""

    def __init__(self, head: ChunkedHead, wanted: Sequence[bool]) -> None:
        self._head, self._weight_wanted = head, wanted[1]
        hidden, weight, bias = head.hidden, head.weight, head.bias
        several = len(head.chunks) > 1
        self._hidden = torch.empty_like(hidden) if wanted[0] else None
        # Without rows the gradient is zero, but the weight still takes part, since other ranks may have rows.
        self._weight = torch.zeros_like(weight) if wanted[1] and not head.chunks else None
        self._weight_dtype = _sum_dtype(weight, several)
        memory = table_memory(head.wide_weight) if wanted[1] and weight.dtype == torch.float32 else None
        self._room = None if memory is None else memory.gradients.take(weight.shape, weight.dtype)
        self._bias = None
        if wanted[2] and bias is not None:
            self._bias = torch.zeros_like(bias, dtype=_sum_dtype(bias, several))

    def add(self, chunk: slice, grad: Tensor, slopes: Tensor | None) -> None:
        """Add the gradients from one chunk.

        grad: that of its logits, zero in the classes of zeros; it may be overwritten. slopes: see `ChunkedHead`.
        """
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
        """The gradients of hidden, weight and bias."""
        head, weight = self._head, self._weight
        if weight is not None and weight.shape[0] != head.classes:
            weight = weight[: head.classes]
        return self._hidden, _in_dtype_of(head.weight, weight), _in_dtype_of(head.bias, self._bias)


def _rows_per_chunk(weight: Tensor, shard: VocabularyShard | None, fused: bool) -> int:
    """The number of rows whose logits may be in memory at once; the same on every rank."""
    held = weight.shape[0] if shard is None else shard.most
    if weight.device.type == "cuda":
        alone = fused and shard is None and library.serves(weight.device)
        most = max(_GPU_ROWS, _GPU_CHUNK_BYTES // ((weight.element_size() if alone else 8) * held))
        return -(-most // _TILE) * _TILE
    return max(1, _CHUNK_BYTES // (4 * _aligned(held)))


def _rows_of(rows: int, weight: Tensor, shard: VocabularyShard | None, fused: bool) -> int:
    """The number of rows in a chunk. On a GPU, where chunks are few, they have equal sizes."""
    most = _rows_per_chunk(weight, shard, fused)
    if weight.device.type != "cuda" or rows <= most:
        return most
    equal = -(-rows // -(-rows // most))
    return min(most, -(-equal // _TILE) * _TILE)


def _classes_with_zeros(hidden: Tensor, classes: int) -> int:
    """The number of classes, with zeros, for products of hidden (..., hidden_size) with a weight of `classes`."""
    width = hidden.shape[-1] if hidden.dim() else 1
    if hidden.device.type != "cuda" or torch.compiler.is_compiling() or hidden.numel() < _WIDENED_ROWS * width:
        return classes  # generation asks for a few rows at a time
    if hidden.dtype == torch.float64 or classes * product_dtype(hidden).itemsize % _ALIGNED_BYTES == 0:
        return classes
    return -(-classes // _WHOLE_LINES) * _WHOLE_LINES


def widened(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """weight and bias for products with hidden, padded with classes of zeros if that is faster."""
    more = _classes_with_zeros(hidden, weight.shape[0]) - weight.shape[0]
    if not more:
        return weight, bias
    return F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))


def _aligned(classes: int) -> int:
    """The length of fp32 rows that begin at multiples of 64 bytes."""
    return -(-classes // 16) * 16


def _logits_room(rows: int, weight: Tensor) -> Tensor | None:
    """(rows, classes): reusable memory for chunks of fp32 logits on a CPU, where new memory would cost a tenth of the
    product's time, and unaligned rows a quarter."""
    if not library.plain_fp32(weight) or not rows:
        return None
    classes, memory = weight.shape[0], table_memory(weight)
    shape = rows, _aligned(classes)
    room = weight.new_empty(shape) if memory is None else memory.logits.take(shape, weight.dtype)
    return room[:, :classes]


def _sum_dtype(x: Tensor, several: bool) -> torch.dtype:
    """The dtype in which the gradient of x is summed over chunks: in 16 bits every sum would be rounded, and stop
    growing. Matrices on a GPU keep their dtype: their chunks are few, and an fp32 gradient would be large."""
    if not several or (x.device.type == "cuda" and x.dim() > 1):
        return x.dtype
    return torch.promote_types(x.dtype, torch.float32)


def _in_dtype_of(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if parameter is None or gradient is None else gradient.to(parameter.dtype)
