"""Term weights: the logits of a vocabulary head, pooled over the tokens of sequences, without ever holding them all.

For logits z (tokens, classes) the weight of a class in a sequence is the maximum, or the sum, over its tokens of
log(1 + relu(z)) (SPLADE, Formal et al. 2021, arXiv:2107.05720 and arXiv:2109.10086). The logits are computed for some
classes at a time, and of these only the pooled (sequences, classes) are kept.

The maximum of a class depends on one token, and most maxima are cut off at 0. So the gradient of the logits is zero but
for a few entries: on a CPU, backward reads only the rows of these. On a GPU the number of entries would have to be
waited for; there, backward multiplies by some columns of the whole gradient at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss.chunks import widened
from engine.loss.vocabulary import local_vocabulary
from engine.ops import library, matmul, matmul_nt
from engine.ops.autocast import as_factors
from engine.ops.autograd import once_differentiable
from engine.ops.embeddings import head_gives_gradient
from engine.ops.table_memory import is_plain_table, table_memory
from engine.parallel import functional

# Bytes of the logits of one chunk of classes. A product with fewer columns than the second is less efficient.
_CHUNK_BYTES, _GPU_CHUNK_BYTES, _FEWEST = 64 << 20, 512 << 20, 256
# Columns of a chunk are a multiple of this, so that rows of logits begin at cache lines.
_LINE = 64

POOLINGS = ("max", "sum")
ACTIVATIONS = ("relu", "log1p_relu")


def linear_term_weights(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    *,
    pooling: str = "max",
    activation: str = "relu",
) -> Tensor:
    """The term weights of sequences, as SpladePooling of sentence-transformers makes them of a head's logits.

    Args:
        hidden: (T, hidden_size), the inputs of the head's output matrix. weight: (classes, hidden_size), bias:
            (classes,) or None, whole or split by rows over a tensor-parallel group.
        offsets: (n + 1,) integers on the device of hidden: sequence i has the tokens offsets[i] : offsets[i + 1]; other
            tokens are not read.
        pooling: "max" or "sum" over the tokens of a sequence. activation: "relu": of log(1 + relu(logit));
            "log1p_relu": of log(1 + log(1 + relu(logit))) (arXiv:2504.14839).

    Returns:
        (n, classes) fp32 (or fp64), whole on every rank; 0 for a sequence without tokens.
    """
    assert pooling in POOLINGS and activation in ACTIVATIONS
    weight, bias, shard = local_vocabulary(hidden, weight, bias)
    if shard is not None:
        hidden = functional.copy_to(hidden, shard.group)
    hidden, weight, bias = as_factors(hidden, weight, bias)
    twice, train = activation == "log1p_relu", torch.is_grad_enabled()  # which forward itself cannot see
    found = _OPERATORS[pooling].apply(hidden, weight, bias, offsets, twice, train)
    return found if shard is None else functional.join_columns(found, shard.group, shard.vocab)


class _Columns:
    """The logits of a head without autograd, for some classes at a time.

    Attributes:
        parts: slices that cover all classes.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        tokens, classes = hidden.shape[0], weight.shape[0]
        most = (_CHUNK_BYTES if hidden.device.type == "cpu" else _GPU_CHUNK_BYTES) // (4 * max(tokens, 1))
        step = min(-(-classes // _LINE) * _LINE, max(_FEWEST, most // _LINE * _LINE))
        self.parts = [slice(first, min(first + step, classes)) for first in range(0, classes, max(step, 1))]
        self._room = None
        if library.plain_fp32(hidden, weight, bias):
            memory = table_memory(weight)
            shape = tokens, step
            self._room = weight.new_empty(shape) if memory is None else memory.logits.take(shape, weight.dtype)

    def logits(self, part: slice) -> Tensor:
        """(T, those classes), in the dtype of hidden. On a CPU they use the memory of the previous part."""
        count = part.stop - part.start
        bias = None if self._bias is None else self._bias[part]
        if self._room is not None:
            return matmul_nt(self._hidden, self._weight[part], bias, self._room[:, :count])
        return matmul_nt(self._hidden, *widened(self._hidden, self._weight[part], bias))[:, :count]


class _Sequences:
    """Sequences of tokens: on a CPU as numbers of the host, elsewhere as a tensor that it does not wait for."""

    def __init__(self, offsets: Tensor, tokens: int) -> None:
        self.count, self.tokens, self._offsets = len(offsets) - 1, tokens, offsets
        self.ends = offsets.tolist() if offsets.device.type == "cpu" else None

    def reduce(self, x: Tensor, how: str) -> Tensor:
        """(T, width) -> (n, width): "max", "min" or "sum" over each sequence; infinite or 0 for one without tokens."""
        if self.ends is None:
            return torch.segment_reduce(x, how, offsets=self._offsets, axis=0, unsafe=True)
        none = {"max": -torch.inf, "min": torch.inf, "sum": 0.0}[how]
        out = x.new_full((self.count, x.shape[1]), none)
        reduce: Any = {"max": torch.amax, "min": torch.amin, "sum": torch.sum}[how]
        for row, (start, stop) in enumerate(pairwise(self.ends)):
            if start < stop:
                reduce(x[start:stop], 0, out=out[row])
        return out

    def spread(self, x: Tensor, rest: float = 0.0) -> Tensor:
        """(n, width) -> (T, width), each row to the tokens of its sequence; `rest` to tokens outside of all."""
        place = torch.arange(self.tokens, device=x.device)
        number = torch.searchsorted(self._offsets[1:].contiguous(), place, right=True)
        number = torch.where(place < self._offsets[0], self.count, number)
        return F.pad(x, (0, 0, 0, 1), value=rest).index_select(0, number)


class _Greatest(torch.autograd.Function):
    """The maximum over the tokens of each sequence. The activation rises, so it is applied to the greatest logit."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, twice: bool, train: bool
    ) -> Tensor:
        train = train and any(ctx.needs_input_grad)
        ctx.table = weight if ctx.needs_input_grad[1] and is_plain_table(weight) else None
        ctx.twice, ctx.sparse = twice, offsets.device.type == "cpu"
        columns, sequences = _Columns(hidden, weight, bias), _Sequences(offsets, len(hidden))
        found = hidden.new_zeros(sequences.count, len(weight), dtype=_wide_dtype(hidden))
        if ctx.sparse:
            rows, tokens, classes = _find_entries(columns, sequences, found, train)
            _activate_(found, twice)
            if train:
                slopes = _slopes(found[rows, classes], twice)
                ctx.save_for_backward(hidden, weight, bias, rows, tokens, classes, slopes)
        else:
            at = _find_tokens(columns, sequences, found, train)
            _activate_(found, twice)
            if train:
                ctx.save_for_backward(hidden, weight, bias, found, at)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.table is not None:
            head_gives_gradient(ctx.table, ctx)
        if ctx.sparse:
            hidden, weight, bias, rows, tokens, classes, slopes = ctx.saved_tensors
            values = grad[rows, classes] * slopes
            return *_sparse_gradients(hidden, weight, bias, tokens, classes, values, ctx.needs_input_grad), *(None,) * 3
        hidden, weight, bias, found, at = ctx.saved_tensors
        dense = _DenseGradients(hidden, weight, bias, ctx.needs_input_grad)
        for part in _Columns(hidden, weight, bias).parts if len(found) else ():
            values = grad[:, part] * _slopes(found[:, part], ctx.twice)
            # Added, as a sequence without tokens has the (zero) gradient of another's token.
            dense.add(part, values.new_zeros(len(hidden), values.shape[1]).scatter_add_(0, at[:, part].long(), values))
        return *dense.finish(), *(None,) * 3


class _Sum(torch.autograd.Function):
    """The sum over the tokens of each sequence; backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, twice: bool, train: bool
    ) -> Tensor:
        ctx.table = weight if ctx.needs_input_grad[1] and is_plain_table(weight) else None
        ctx.twice = twice
        ctx.save_for_backward(hidden, weight, bias, offsets)
        columns, sequences = _Columns(hidden, weight, bias), _Sequences(offsets, len(hidden))
        found = hidden.new_zeros(sequences.count, len(weight), dtype=_wide_dtype(hidden))
        for part in columns.parts if len(found) else ():
            found[:, part] = sequences.reduce(_activate_(columns.logits(part).to(found.dtype), twice), "sum")
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.table is not None:
            head_gives_gradient(ctx.table, ctx)
        hidden, weight, bias, offsets = ctx.saved_tensors
        columns, sequences = _Columns(hidden, weight, bias), _Sequences(offsets, len(hidden))
        dense = _DenseGradients(hidden, weight, bias, ctx.needs_input_grad)
        for part in columns.parts if len(grad) else ():
            slopes = _slopes(_activate_(columns.logits(part).to(grad.dtype), ctx.twice), ctx.twice)
            dense.add(part, slopes.mul_(sequences.spread(grad[:, part])))
        return *dense.finish(), *(None,) * 3


_OPERATORS: dict[str, Any] = {"max": _Greatest, "sum": _Sum}


# -- the activation --------------------------------------------------------------------------------------------------


def _activate_(logits: Tensor, twice: bool) -> Tensor:
    weights = logits.relu_().log1p_()
    return weights.log1p_() if twice else weights


def _slopes(weights: Tensor, twice: bool) -> Tensor:
    """The derivative of term weights with respect to the logits, from the weights alone; 0 where they are 0."""
    exponent = weights + weights.expm1() if twice else weights
    return exponent.neg().exp_().mul_(weights > 0)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# -- the greatest logits ---------------------------------------------------------------------------------------------


def _find_entries(
    columns: _Columns, sequences: _Sequences, found: Tensor, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill `found` (n, classes) with the greatest logit of each sequence and class, on a CPU.

    Returns:
        If `train`: sequence, token and class, (k,) each, of the greatest logits above 0. To find the tokens of all
        would take a fifth of the time of the product; those few cost next to nothing.
    """
    entries = [(torch.zeros(0, dtype=torch.int64),) * 3]
    assert sequences.ends is not None
    for part in columns.parts:
        logits = columns.logits(part)
        top = sequences.reduce(logits, "max")
        found[:, part] = top
        for row, (start, stop) in enumerate(pairwise(sequences.ends)) if train else ():
            above = (top[row] > 0).nonzero().flatten()
            if len(above):
                at = logits[start:stop].index_select(1, above).max(0).indices
                entries.append((torch.full_like(at, row), at.add_(start), above.add_(part.start)))
    rows, tokens, classes = (torch.cat(parts) for parts in zip(*entries, strict=True))
    return rows, tokens, classes


def _find_tokens(columns: _Columns, sequences: _Sequences, found: Tensor, train: bool) -> Tensor:
    """As `_find_entries`, with shapes that do not depend on values. Returns (n, classes) int32: the token of each."""
    at = torch.zeros_like(found, dtype=torch.int32)
    places = torch.arange(sequences.tokens, dtype=torch.float32, device=found.device)[:, None]  # exact below 2^24
    for part in columns.parts if found.numel() and sequences.tokens else ():
        logits = columns.logits(part)
        top = sequences.reduce(logits, "max")
        found[:, part] = top
        if train:
            hit = torch.where(logits == sequences.spread(top), places, torch.inf)
            at[:, part] = sequences.reduce(hit, "min").clamp_(max=sequences.tokens - 1)
    return at


# -- gradients -------------------------------------------------------------------------------------------------------


def _sparse_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    classes: Tensor,
    values: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of hidden, weight and bias from the entries (k,) of that of the logits, on a CPU.

    As sums of rows (bags) and not by torch's sparse matrices, which take twice as long.
    """
    gradients: list[Tensor | None] = [None, None, None]
    if wanted[0]:
        gradients[0] = _sums_of_rows(weight, classes, tokens, values, len(hidden)).to(hidden.dtype)
    if wanted[1]:
        gradients[1] = _sums_of_rows(hidden, tokens, classes, values, len(weight)).to(weight.dtype)
    if wanted[2] and bias is not None:
        gradients[2] = values.new_zeros(len(bias)).index_add_(0, classes, values).to(bias.dtype)
    return gradients


def _sums_of_rows(table: Tensor, rows: Tensor, to: Tensor, factors: Tensor, count: int) -> Tensor:
    """(count, width): the sum of the table's `rows` (k,) times `factors` (k,) in the row `to` (k,) of each."""
    order = to.argsort()
    ends = F.pad(torch.bincount(to, minlength=count).cumsum(0), (1, 0))
    table = table.to(factors.dtype)
    return F.embedding_bag(
        rows[order], table, ends, mode="sum", per_sample_weights=factors[order], include_last_offset=True
    )


class _DenseGradients:
    """The gradients of hidden, weight and bias from those of the logits, of some classes at a time."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        self._factors = hidden, weight
        self._hidden = torch.zeros_like(hidden, dtype=_wide_dtype(hidden)) if wanted[0] else None
        self._weight = torch.zeros_like(weight) if wanted[1] else None
        self._bias = torch.zeros_like(bias) if wanted[2] and bias is not None else None

    def add(self, part: slice, grad: Tensor) -> None:
        """grad: (T, classes of the part)."""
        hidden, weight = self._factors
        if self._bias is not None:
            self._bias[part] = grad.sum(0)
        grad = grad.to(hidden.dtype)
        if self._hidden is not None:
            self._hidden += matmul(grad, weight[part])
        if self._weight is not None:
            self._weight[part] = matmul(grad.t(), hidden)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden = self._hidden
        return None if hidden is None else hidden.to(self._factors[0].dtype), self._weight, self._bias
