"""Cross-entropy, once: labelled positions only, in chunks of vocabulary logits, summed and divided by a given count.

The count is that of the whole global batch, so a gradient does not depend on how the batch is cut into microbatches and
ranks. Vocabulary logits exist for one chunk of positions at a time; their gradient is taken in the forward pass, where
the logits still are, as the only thing that backward adds is a scalar factor. Not so in fp16, where a gradient divided
by the count is below the smallest number unless the loss scale, which backward brings, multiplies it first: there the
logits are computed again.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine import runtime
from engine.ops import cross_entropy_, library, linear, matmul, matmul_nt
from engine.ops.autocast import as_factors, product_dtype
from engine.ops.autograd import once_differentiable
from engine.ops.cross_entropy import losses_
from engine.ops.embeddings import head_gives_gradient
from engine.ops.table_memory import is_plain_table, table_memory
from engine.parallel import functional
from engine.parallel.mesh import device_mesh
from engine.tensors import local_box
from engine.torch_compat import assert_on_device

IGNORE_INDEX = -100
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


def cross_entropy(logits: Tensor, targets: Tensor, count: Tensor | float, *, label_smoothing: float = 0.0) -> Tensor:
    """Sum of cross-entropies over the labelled rows / count.

    Args:
        logits: (n, classes). targets: (n,) int64, -100 where there is no label. count: what the sum is divided by.
    """
    total = F.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=label_smoothing)
    return total / _at_least_one(count)


@dataclass
class ExtendedVocabulary:
    """A vocabulary that goes on with words of the batch: the `weight` of the functions below, which has no bias then.

    words: (vocab_size, hidden_size), a weight as these functions take it. more: (n, hidden_size), of the classes from
    vocab_size on; whole, and the same, on each rank that has a part of the words.
    """

    words: Tensor
    more: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.words.shape[0] + self.more.shape[0], self.words.shape[1]))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | ExtendedVocabulary,
    bias: Tensor | None,
    targets: Tensor,
    count: Tensor | float,
    *,
    label_smoothing: float = 0.0,
    all_labelled: bool = False,
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, targets, count) without ever holding all logits.

    Args:
        hidden: (n, hidden_size), labelled or not. weight: (vocab_size, hidden_size). bias: (vocab_size,) or None.
        targets: (n,) int64, -100 where there is no label; those rows cost nothing.
        all_labelled: no target is -100, so a GPU need not be asked which are.

    Under tensor parallelism weight and bias are DTensors split by rows of the vocabulary. Each rank computes its part
    of the logits, and the ranks agree on the sums: hidden, targets and the result are the same on all of them.
    """
    if not all_labelled:
        labelled = (targets != IGNORE_INDEX).nonzero().flatten()
        if labelled.numel() != targets.numel():
            hidden, targets = hidden.index_select(0, labelled), targets.index_select(0, labelled)
    weight, bias, shard = _local_vocabulary(hidden, weight, bias)
    if shard is not None:
        shard.check(targets)
    hidden, weight, bias = as_factors(hidden, weight, bias)
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, _at_least_one(count), label_smoothing, shard)


def linear_log_probs(
    hidden: Tensor, weight: Tensor | ExtendedVocabulary, bias: Tensor | None, targets: Tensor
) -> Tensor:
    """log_softmax(hidden @ weight.T + bias) at the target of each row, without ever holding all logits.

    For losses that are no sum over rows, such as of preferences. As their gradient is not known in forward, chunks of
    logits are computed again in backward.

    Args:
        hidden: (n, hidden_size). weight, bias: as for linear_cross_entropy. targets: (n,) int64, none of them -100.

    Returns:
        (n,) fp32.
    """
    weight, bias, shard = _local_vocabulary(hidden, weight, bias)
    if shard is not None:
        shard.check(targets)
    hidden, weight, bias = as_factors(hidden, weight, bias)
    return _LinearLogProbs.apply(hidden, weight, bias, targets, shard)


def vocabulary_logits(hidden: Tensor, weight: Tensor | ExtendedVocabulary, bias: Tensor | None) -> Tensor:
    """hidden (..., hidden_size) @ weight.T + bias, whole on every rank however weight and bias are split."""
    if isinstance(weight, ExtendedVocabulary):
        return torch.cat([vocabulary_logits(hidden, part, None) for part in (weight.words, weight.more)], -1)
    weight, bias, shard = _local_vocabulary(hidden, weight, bias)
    if shard is not None:
        hidden = functional.copy_to(hidden, shard.group)
    classes = weight.shape[0]
    logits = linear(hidden, *_widened(hidden, weight, bias))[..., :classes]
    if shard is None:
        return logits
    return functional.join_columns(logits.contiguous(), shard.group, shard.vocab)


@dataclass
class _VocabularyShard:
    """Rows of the vocabulary that this rank of a tensor-parallel group has, from number `first` on."""

    group: Any
    vocab: int
    first: int

    def check(self, targets: Tensor) -> None:
        """Raises IndexError as cross_entropy does: without it, a target that no rank has would have the logit 0."""
        if targets.device.type != "cpu":
            within = ((targets >= 0) & (targets < self.vocab)).all()
            assert_on_device(within, "target out of range of a vocabulary that tp_size splits")
        elif targets.numel():
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= self.vocab:
                wrong, last = low if low < 0 else high, self.vocab - 1
                raise IndexError(f"target is {wrong}, expected 0 to {last}: the classes that the ranks together have")

    def sum(self, x: Tensor) -> Tensor:
        if x.numel():
            dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        if x.numel():
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


def _local_vocabulary(
    hidden: Tensor, weight: Tensor | ExtendedVocabulary, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, _VocabularyShard | None]:
    """(this rank's rows of weight, of bias, which they are), in the graph; plain tensors are whole: (..., None)."""
    if isinstance(weight, ExtendedVocabulary):
        assert bias is None
        words, _, shard = _local_vocabulary(hidden, weight.words, None)
        more = weight.more
        if shard is not None:  # they are behind those of the last rank, and their gradient is there
            more = functional.copy_to(more, shard.group)
            more = more if shard.group.rank() == shard.group.size() - 1 else more[:0]
            shard = replace(shard, vocab=weight.shape[0])
        return torch.cat((words, more)), None, shard
    if weight.is_meta and not hidden.is_meta:  # torch's product of the two is whatever was in memory
        raise ValueError(
            "the weight of the vocabulary is on the meta device: a head that is tied to a table needs it after the "
            "table's own forward. Hooks that move weights of single modules away (accelerate's cpu_offload) are to "
            "leave the table where it is"
        )
    if not hasattr(weight, "to_local"):
        return weight, bias, None
    from torch.distributed.tensor import Shard

    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tuple(getattr(tensor, "placements", ())) != (Shard(0),):
            raise ValueError(
                f"the {name} of the vocabulary is not split by rows over one mesh dimension: give the table, the "
                "head's weight and its bias the style 'vocab' in tp_plan"
            )
    mesh = weight.device_mesh  # type: ignore[attr-defined]
    first = local_box(weight.shape, mesh, (Shard(0),))[1][0]
    shard = _VocabularyShard(mesh.get_group(), weight.shape[0], first)
    return weight.to_local(), None if bias is None else bias.to_local(), shard  # type: ignore[attr-defined]


def _at_least_one(count: Tensor | float) -> Tensor | float:
    """A batch without labels has loss 0, not 0 / 0: a rank with an empty microbatch adds nothing."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


_NONE = (False, False, False)  # gradients by hidden, weight and bias


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        count: Tensor | float,
        smoothing: float,
        shard: _VocabularyShard | None,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        train = any(wanted)
        ctx.table = weight if wanted[1] and is_plain_table(weight) else None
        ctx.recompute = train and hidden.dtype == torch.float16
        total, *grads = _losses_and_gradients(
            hidden, weight, bias, targets, count, smoothing, shard, _NONE if ctx.recompute else wanted
        )
        ctx.count, ctx.smoothing, ctx.shard = count, smoothing, shard
        if train:
            ctx.save_for_backward(*((hidden, weight, bias, targets) if ctx.recompute else grads))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.table is not None:
            head_gives_gradient(ctx.table, ctx)
        if ctx.recompute:
            hidden, weight, bias, targets = ctx.saved_tensors
            scaled = ctx.count / grad  # what the gradient in fp32 is divided by, before it is fp16
            _, dhidden, dweight, dbias = _losses_and_gradients(
                hidden, weight, bias, targets, scaled, ctx.smoothing, ctx.shard, ctx.needs_input_grad[:3]
            )
            if ctx.shard is not None and dhidden is not None:
                dhidden = ctx.shard.sum(dhidden)
            return dhidden, dweight, dbias, None, None, None, None
        dhidden, dweight, dbias = ctx.saved_tensors
        if ctx.shard is not None and dhidden is not None:
            dhidden = ctx.shard.sum(dhidden.clone())
        if grad.device.type != "cpu" or grad.item() != 1.0:  # reading a scalar costs nothing on a CPU
            dhidden, dweight, dbias = (None if g is None else g * grad.to(g.dtype) for g in (dhidden, dweight, dbias))
        return dhidden, dweight, dbias, None, None, None, None


def _losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    count: Tensor | float,
    smoothing: float,
    shard: _VocabularyShard | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(sum of the losses in fp32; where `wanted` the gradients of the sum / count by hidden, which is this rank's part
    of it under tensor parallelism, by weight and by bias): a head that is frozen beside an adapter has none."""
    train = any(wanted)
    rows, classes = _rows_of(hidden.shape[0], weight, shard), weight.shape[0]
    total = hidden.new_zeros((), dtype=torch.float32)
    dhidden = torch.empty_like(hidden) if wanted[0] else None
    # No rows: the gradient is zero, but weight still takes part (another rank may have rows).
    dweight = torch.zeros_like(weight) if wanted[1] and not hidden.shape[0] else None
    several = hidden.shape[0] > rows
    dbias = torch.zeros_like(bias, dtype=_sum_dtype(bias, several)) if wanted[2] and bias is not None else None
    wide_weight, wide_bias = _widened(hidden, weight, bias)
    memory = table_memory(wide_weight) if wanted[1] and weight.dtype == torch.float32 else None
    weight_room = None if memory is None else memory.gradients.take(weight.shape, weight.dtype)
    room = _logits_room(min(rows, hidden.shape[0]), wide_weight)
    for start in range(0, hidden.shape[0], rows):
        h, t = hidden[start : start + rows], targets[start : start + rows]
        whole = _logits(h, wide_weight, wide_bias, room)  # later their gradient, zero in the classes that are none
        logits = whole[:, :classes]
        if shard is None:
            total += cross_entropy_(logits, t, count, smoothing, train).sum()
        else:
            total += _losses_of_shard(logits, t, count, smoothing, train, shard).sum()
        if train:
            grad = whole.to(hidden.dtype)
            if dhidden is not None:
                dhidden[start : start + rows] = matmul(grad, wide_weight)
            if wanted[1]:
                dweight = matmul(grad.t(), h, add_to=dweight, room=weight_room).to(_sum_dtype(weight, several))
            if dbias is not None:
                dbias += grad[:, :classes].sum(0, dtype=dbias.dtype)
            del grad
        del whole, logits  # before the next chunk, which takes their memory
    if dweight is not None and dweight.shape != weight.shape:
        dweight = dweight[:classes]
    return total, dhidden, _in_dtype_of(weight, dweight), _in_dtype_of(bias, dbias)


def _losses_of_shard(
    logits: Tensor, targets: Tensor, count: Tensor | float, smoothing: float, train: bool, shard: _VocabularyShard
) -> Tensor:
    """cross_entropy_ where logits (n, columns) are this rank's part."""
    wide = logits.float()
    at, hit = _within(targets[:, None] - shard.first, logits.shape[1])
    sums = _reduce_over_vocabulary(wide, at, hit, shard)
    in_place = wide is logits
    losses = losses_(wide, at, sums, count if in_place else 1, smoothing, train, shard.vocab, hit)
    if train and not in_place:  # divided as they become 16 bits, in one pass
        torch.div(wide, count, out=logits)
    return losses


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shard: _VocabularyShard | None
    ) -> Tensor:
        rows, classes = _rows_of(hidden.shape[0], weight, shard, fused=False), weight.shape[0]
        sums = hidden.new_empty((hidden.shape[0], 1), dtype=torch.float32)
        found = torch.empty_like(sums)
        wide_weight, wide_bias = _widened(hidden, weight, bias)
        room = _logits_room(min(rows, hidden.shape[0]), wide_weight)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            logits, t = _logits(hidden[chunk], wide_weight, wide_bias, room)[:, :classes].float(), targets[chunk, None]
            if shard is None:
                sums[chunk], found[chunk] = torch.logsumexp(logits, -1, keepdim=True), logits.gather(1, t)
            else:
                t, hit = _within(t - shard.first, logits.shape[1])
                sums[chunk], found[chunk], _ = _reduce_over_vocabulary(logits, t, hit, shard)
        ctx.shard, ctx.table = shard, weight if ctx.needs_input_grad[1] and is_plain_table(weight) else None
        ctx.save_for_backward(hidden, weight, bias, targets, sums)
        return (found - sums).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sums = ctx.saved_tensors
        if ctx.table is not None:
            head_gives_gradient(ctx.table, ctx)
        shard = ctx.shard
        rows, classes = _rows_of(hidden.shape[0], weight, shard, fused=False), weight.shape[0]
        several = hidden.shape[0] > rows
        wide_weight, wide_bias = _widened(hidden, weight, bias)
        room = _logits_room(min(rows, hidden.shape[0]), wide_weight)
        dhidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        dweight, dbias = (
            torch.zeros_like(x, dtype=_sum_dtype(x, several)) if wanted else None
            for x, wanted in zip((wide_weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            h, t, g = hidden[chunk], targets[chunk, None], grad[chunk, None].float()
            whole = _logits(h, wide_weight, wide_bias, room)  # later their gradient
            logits = whole[:, :classes]
            d = logits.float().sub_(sums[chunk]).exp_().mul_(-g)
            if shard is not None:
                t, hit = _within(t - shard.first, d.shape[1])
                g = g * hit
            if d.shape[1]:
                d.scatter_add_(1, t, g)
            if d.dtype != whole.dtype:
                logits.copy_(d)
            whole = whole.to(hidden.dtype)
            if dhidden is not None:
                dhidden[chunk] = matmul(whole, wide_weight)
            if dweight is not None:
                dweight = matmul(whole.t(), h, add_to=dweight)
            if dbias is not None:
                dbias += whole[:, :classes].sum(0, dtype=dbias.dtype)
            del whole, logits, d  # before the next chunk, which takes their memory
        if dweight is not None and dweight.shape != weight.shape:
            dweight = dweight[:classes]
        if shard is not None and dhidden is not None:
            dhidden = shard.sum(dhidden)
        return dhidden, _in_dtype_of(weight, dweight), _in_dtype_of(bias, dbias), None, None


def _rows_per_chunk(weight: Tensor, shard: _VocabularyShard | None, fused: bool = True) -> int:
    """How many rows may have their logits in memory at once; the same number on every rank.

    fused: the loss and its gradient are `cross_entropy_`'s, which takes no memory where it is compiled. torch's
    operators work on two more sets of logits, in fp32.
    """
    held = weight.shape[0] if shard is None else -(-shard.vocab // shard.group.size())
    if weight.device.type == "cuda":
        alone = fused and shard is None and library.serves(weight.device)
        most = max(_GPU_ROWS, _GPU_CHUNK_BYTES // ((weight.element_size() if alone else 8) * held))
        return -(-most // _TILE) * _TILE
    return max(1, _CHUNK_BYTES // (4 * _aligned(held)))


def _rows_of(rows: int, weight: Tensor, shard: _VocabularyShard | None, fused: bool = True) -> int:
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


def _widened(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
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


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor | None) -> Tensor:
    """(rows, classes) fp32, bf16 or fp16, in the room of a chunk if there is one."""
    logits = matmul_nt(hidden, weight, bias, None if room is None else room[: len(hidden)])
    return logits.float() if logits.dtype == torch.float64 else logits


def _sum_dtype(x: Tensor, several: bool) -> torch.dtype:
    """In what the chunks' parts of the gradient of x are added up: in 16 bits each sum would be rounded, and stop
    growing. A matrix on a GPU is left at that: its chunks are large, so few, and its gradient in fp32 would be too.
    """
    if not several or (x.device.type == "cuda" and x.dim() > 1):
        return x.dtype
    return torch.promote_types(x.dtype, torch.float32)


def _in_dtype_of(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if parameter is None or gradient is None else gradient.to(parameter.dtype)


def _within(t: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(targets as columns of this rank's logits, which of them it has); those it has not are column 0."""
    hit = (t >= 0) & (t < columns)
    return t.masked_fill(~hit, 0), hit


def _reduce_over_vocabulary(
    logits: Tensor, t: Tensor, hit: Tensor, shard: _VocabularyShard
) -> tuple[Tensor, Tensor, Tensor]:
    """(logsumexp (n, 1), logit at the target (n, 1), mean (n,)) over the vocabulary, of logits (n, own columns)."""
    top = logits.new_full((logits.shape[0], 1), -torch.inf)
    sums = logits.new_zeros(logits.shape[0], 3)
    if logits.shape[1]:
        top = logits.amax(1, keepdim=True)
    shard.largest(top)
    if logits.shape[1]:
        sums[:, 0] = (logits - top).exp_().sum(1)
        sums[:, 1] = (logits.gather(1, t) * hit).squeeze(1)
        sums[:, 2] = logits.sum(1)
    shard.sum(sums)
    return sums[:, :1].log() + top, sums[:, 1:2], sums[:, 2] / shard.vocab


def _equal_shard(classes: int) -> _VocabularyShard | None:
    """This rank's share of classes, as many as each of its tensor-parallel group has; None: it is alone."""
    if runtime.current().tp_size == 1:
        return None
    group = device_mesh()["tp"].get_group()
    return _VocabularyShard(group, classes * group.size(), classes * group.rank())


class _ParallelCrossEntropy(torch.autograd.Function):
    """Logits (n, this rank's classes), targets (n,) among all classes -> (n,) fp32, the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, shard: _VocabularyShard) -> Tensor:
        t, hit = _within(targets[:, None] - shard.first, logits.shape[1])
        values = logits.float()
        lse, at_target, mean = _reduce_over_vocabulary(values, t, hit, shard)
        ctx.save_for_backward(logits, lse, t, hit)
        ctx.smoothing, ctx.vocab = smoothing, shard.vocab
        return (lse - (1 - smoothing) * at_target).squeeze(1) - smoothing * mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, t, hit = ctx.saved_tensors
        out = (logits.float() - lse).exp_()
        if ctx.smoothing:
            out.sub_(ctx.smoothing / ctx.vocab)
        if out.shape[1]:
            out.scatter_add_(1, t, hit * (ctx.smoothing - 1.0))
        return (out * grad[:, None]).to(logits.dtype), None, None, None


class FusedCrossEntropy(torch.nn.Module):
    """Cross-entropy with the arguments of BMTrain's and of ``torch.nn.CrossEntropyLoss``, in fp32 for all logits.

    "mean" is over this rank's labels (weighted, with ``weight``); without any label it is 0, where torch gives nan.

    Args:
        weight: (classes,), a factor for each class, all of them. ignore_index: the target that is no label.
        reduction: "mean", "sum" or "none". label_smoothing: 0 to 1, as in torch.
        parallel: the input has this rank's classes only, an equal share for each rank of its tensor-parallel group
            in their order; targets and the result are the same on all.

    Raises:
        ValueError: an argument is none of these.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction is {reduction!r}, expected mean, sum or none")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing is {label_smoothing!r}, expected 0 to 1")
        if weight is not None and weight.ndim != 1:
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (classes,)")
        if parallel and weight is not None and label_smoothing:
            raise ValueError("parallel=True takes weight or label_smoothing, not both")
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.parallel = parallel

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input (n, classes), target (n,) of whole numbers -> 0-d fp32, or (n,) with reduction "none"."""
        if input.ndim != 2 or target.shape != input.shape[:1]:
            raise ValueError(
                f"input {tuple(input.shape)} and target {tuple(target.shape)} are not (n, classes) and (n,)"
            )
        weight = None if self.weight is None else self.weight.to(input.device, torch.float32)
        target = target.long()
        labelled = target != self.ignore_index
        classes = torch.where(labelled, target, 0)
        if self.parallel and (shard := _equal_shard(input.shape[1])) is not None:
            shard.check(classes)
            loss = _ParallelCrossEntropy.apply(input, target, self.label_smoothing, shard) * labelled
            if weight is not None:
                if weight.shape[0] != shard.vocab:
                    raise ValueError(f"weight has {weight.shape[0]} classes, the ranks together have {shard.vocab}")
                loss = loss * weight[classes]
            loss = loss if self.reduction == "none" else loss.sum()
        else:
            loss = F.cross_entropy(
                input.float(),
                target,
                weight,
                ignore_index=self.ignore_index,
                reduction="none" if self.reduction == "none" else "sum",
                label_smoothing=self.label_smoothing,
            )
        if self.reduction != "mean":
            return loss
        if weight is None:
            return loss / labelled.sum().clamp(min=1)
        count = torch.where(labelled, weight[classes], 0.0).sum()
        return loss / torch.where(count > 0, count, 1.0)
