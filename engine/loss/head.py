"""Losses of hidden states and the weight of a vocabulary, without ever holding all logits.

The gradient is computed in the forward pass, while a chunk's logits exist, because backward only adds a scalar factor.
In fp16 this does not work: a gradient divided by the count would be below the smallest number, unless the loss scale,
which is known only in backward, multiplies it first. There, backward computes the logits again.
"""

from typing import Any

import torch
from torch import Tensor

from engine.loss.chunks import ChunkedHead, HeadGradients, widened
from engine.loss.distillation import SoftTargets, TaughtLosses
from engine.loss.logits import IGNORE_INDEX, at_least_one
from engine.loss.vocabulary import ExtendedVocabulary, VocabularyShard, local_vocabulary
from engine.ops import cross_entropy_, linear, soft_capped
from engine.ops.autocast import as_factors
from engine.ops.autograd import once_differentiable
from engine.ops.cross_entropy import losses_
from engine.ops.embeddings import head_gives_gradient
from engine.ops.table_memory import is_plain_table
from engine.parallel import functional


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | ExtendedVocabulary,
    bias: Tensor | None,
    targets: Tensor,
    count: Tensor | float,
    *,
    label_smoothing: float = 0.0,
    all_labelled: bool = False,
    cap: float | None = None,
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, targets, count) without ever holding all logits.

    Args:
        hidden: (n, hidden_size), labelled or not. weight: (vocab_size, hidden_size). bias: (vocab_size,) or None.
        targets: (n,) int64, -100 where there is no label; those rows cost nothing.
        all_labelled: no target is -100, so the host need not ask a GPU which ones are.
        cap: soft cap above 0: logits x become cap tanh(x / cap) (Gemma 2). None: no cap.

    Under tensor parallelism, weight and bias are DTensors that are split by rows of the vocabulary. Each rank computes
    its part of the logits, and the ranks exchange sums; hidden, targets and the result are equal on all of them.
    """
    if not all_labelled:
        labelled = (targets != IGNORE_INDEX).nonzero().flatten()
        if labelled.numel() != targets.numel():
            hidden, targets = hidden.index_select(0, labelled), targets.index_select(0, labelled)
    weight, bias, shard = local_vocabulary(hidden, weight, bias)
    if shard is not None:
        shard.check(targets)
    hidden, weight, bias = as_factors(hidden, weight, bias)
    options = at_least_one(count), label_smoothing, shard, None, cap
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, *options)


def linear_distillation(
    hidden: Tensor,
    weight: Tensor | ExtendedVocabulary,
    bias: Tensor | None,
    targets: Tensor,
    count: Tensor | float,
    soft: SoftTargets,
    *,
    label_smoothing: float = 0.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """A mean of linear_cross_entropy and the distance to a teacher's predictions, without ever holding all logits of
    either model.

    Args:
        hidden, weight, bias, count, cap: as in linear_cross_entropy; the teacher's logits have a cap of their own.
        targets: (n,) int64, none of them -100.

    Returns:
        The loss, 0-d, and its two parts, (2,) fp32 outside autograd: cross_entropy(logits, targets, count), and
        T^2 KL(teacher || student) summed and divided by the same count.

    Raises:
        ValueError: the predictions are for another number of rows.
    """
    soft.check(hidden.shape[0])
    weight, bias, shard = local_vocabulary(hidden, weight, bias)
    if shard is not None:
        shard.check(targets)
    hidden, weight, bias = as_factors(hidden, weight, bias)
    options = at_least_one(count), label_smoothing, shard, soft.detached(), cap
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, *options)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor | ExtendedVocabulary,
    bias: Tensor | None,
    targets: Tensor,
    *,
    cap: float | None = None,
) -> Tensor:
    """log_softmax(hidden @ weight.T + bias) at the target of each row, without ever holding all logits.

    For losses that are not sums over rows, such as those of preferences. Since their gradient is not known in forward,
    backward computes the chunks of logits again.

    Args:
        hidden: (n, hidden_size). weight, bias, cap: as in linear_cross_entropy. targets: (n,) int64, none of them -100.

    Returns:
        (n,) fp32.
    """
    weight, bias, shard = local_vocabulary(hidden, weight, bias)
    if shard is not None:
        shard.check(targets)
    hidden, weight, bias = as_factors(hidden, weight, bias)
    return _LinearLogProbs.apply(hidden, weight, bias, targets, shard, cap)


def vocabulary_logits(
    hidden: Tensor, weight: Tensor | ExtendedVocabulary, bias: Tensor | None, *, cap: float | None = None
) -> Tensor:
    """hidden (..., hidden_size) @ weight.T + bias, whole on every rank, however weight and bias are split. cap: as in
    linear_cross_entropy."""
    if isinstance(weight, ExtendedVocabulary):
        return torch.cat([vocabulary_logits(hidden, part, None, cap=cap) for part in (weight.words, weight.more)], -1)
    weight, bias, shard = local_vocabulary(hidden, weight, bias)
    if shard is not None:
        hidden = functional.copy_to(hidden, shard.group)
    classes = weight.shape[0]
    logits = linear(hidden, *widened(hidden, weight, bias))[..., :classes]
    logits = logits if cap is None else soft_capped(logits, cap)
    if shard is None:
        return logits
    return functional.join_columns(logits.contiguous(), shard.group, shard.vocab)


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
        shard: VocabularyShard | None,
        soft: SoftTargets | None,
        cap: float | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss; with a teacher also its two parts."""
        wanted = ctx.needs_input_grad[:3]
        train = any(wanted)
        ctx.table = weight if wanted[1] and is_plain_table(weight) else None
        ctx.recompute = train and hidden.dtype == torch.float16
        ctx.count, ctx.smoothing, ctx.shard, ctx.soft, ctx.cap = count, smoothing, shard, None, cap
        head = ChunkedHead(hidden, weight, bias, shard, fused=soft is None, cap=cap)
        gradients = HeadGradients(head, wanted) if train and not ctx.recompute else None
        total = _sum_of_losses(head, targets, count, smoothing, shard, soft, gradients)
        if gradients is not None:
            ctx.save_for_backward(*gradients.finish())
        elif train:
            ctx.save_for_backward(hidden, weight, bias, targets)
            ctx.soft = soft
        if soft is None:
            return total / count
        means = total / count
        ctx.mark_non_differentiable(means)
        return means[0] * (1 - soft.share) + means[1] * soft.share, means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.table is not None:
            head_gives_gradient(ctx.table, ctx)
        if ctx.recompute:
            hidden, weight, bias, targets = ctx.saved_tensors
            scaled = ctx.count / grad  # the divisor of the fp32 gradient, before it is rounded to fp16
            head = ChunkedHead(hidden, weight, bias, ctx.shard, fused=ctx.soft is None, cap=ctx.cap)
            gradients = HeadGradients(head, ctx.needs_input_grad[:3])
            _sum_of_losses(head, targets, scaled, ctx.smoothing, ctx.shard, ctx.soft, gradients)
            dhidden, dweight, dbias = gradients.finish()
            if ctx.shard is not None and dhidden is not None:
                dhidden = ctx.shard.sum(dhidden)
            return dhidden, dweight, dbias, *(None,) * 6
        dhidden, dweight, dbias = ctx.saved_tensors
        if ctx.shard is not None and dhidden is not None:
            dhidden = ctx.shard.sum(dhidden.clone())
        if grad.device.type != "cpu" or grad.item() != 1.0:  # reading a scalar costs nothing on a CPU
            dhidden, dweight, dbias = (None if g is None else g * grad.to(g.dtype) for g in (dhidden, dweight, dbias))
        return dhidden, dweight, dbias, *(None,) * 6


def _sum_of_losses(
    head: ChunkedHead,
    targets: Tensor,
    count: Tensor | float,
    smoothing: float,
    shard: VocabularyShard | None,
    soft: SoftTargets | None,
    gradients: HeadGradients | None,
) -> Tensor:
    """The sum of the losses in fp32, 0-d; with a teacher (2,), with the sum of the distances to it. gradients: take the
    gradients of sum / count, in which each part has its share."""
    train = gradients is not None
    taught = None if soft is None else TaughtLosses(soft, head, shard)
    total = head.hidden.new_zeros(() if taught is None else 2, dtype=torch.float32)
    for chunk in head.chunks:
        whole = head.logits(chunk)  # becomes their gradient, which is zero in classes that are padding
        slopes = head.slopes(whole) if train else None
        logits = whole[:, : head.classes]
        if taught is not None:
            total += taught.of_(logits, targets[chunk], chunk, count, smoothing, train)
        elif shard is None:
            total += cross_entropy_(logits, targets[chunk], count, smoothing, train).sum()
        else:
            total += _losses_of_shard(logits, targets[chunk], count, smoothing, train, shard).sum()
        if gradients is not None:
            gradients.add(chunk, whole, slopes)
        del whole, logits, slopes  # so that the next chunk reuses their memory
    return total


def _losses_of_shard(
    logits: Tensor, targets: Tensor, count: Tensor | float, smoothing: float, train: bool, shard: VocabularyShard
) -> Tensor:
    """cross_entropy_ for logits (n, columns) that are this rank's part."""
    wide = logits.float()
    at, here = shard.columns(targets, logits.shape[1])
    sums = shard.reduce(wide, at, here)
    in_place = wide is logits
    losses = losses_(wide, at, sums, count if in_place else 1, smoothing, train, shard.vocab, here)
    if train and not in_place:  # divide and convert to 16 bits in one pass
        torch.div(wide, count, out=logits)
    return losses


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shard: VocabularyShard | None,
        cap: float | None,
    ) -> Tensor:
        sums = hidden.new_empty((hidden.shape[0], 1), dtype=torch.float32)
        found = torch.empty_like(sums)
        head = ChunkedHead(hidden, weight, bias, shard, fused=False, cap=cap)
        for chunk in head.chunks:
            logits, t = head.logits(chunk)[:, : head.classes].float(), targets[chunk]
            if shard is None:
                sums[chunk], found[chunk] = torch.logsumexp(logits, -1, keepdim=True), logits.gather(1, t[:, None])
            else:
                sums[chunk], found[chunk], _ = shard.reduce(logits, *shard.columns(t, head.classes))
            del logits
        ctx.shard, ctx.cap = shard, cap
        ctx.table = weight if ctx.needs_input_grad[1] and is_plain_table(weight) else None
        ctx.save_for_backward(hidden, weight, bias, targets, sums)
        return (found - sums).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sums = ctx.saved_tensors
        if ctx.table is not None:
            head_gives_gradient(ctx.table, ctx)
        head = ChunkedHead(hidden, weight, bias, ctx.shard, fused=False, cap=ctx.cap)
        gradients = HeadGradients(head, ctx.needs_input_grad[:3])
        for chunk in head.chunks:
            g = grad[chunk, None].float()
            whole = head.logits(chunk)  # becomes their gradient
            slopes, logits = head.slopes(whole), whole[:, : head.classes]
            d = logits.float().sub_(sums[chunk]).exp_().mul_(-g)
            if ctx.shard is None:
                at = targets[chunk, None]
            else:
                at, here = ctx.shard.columns(targets[chunk], head.classes)
                g = g * here
            if d.shape[1]:
                d.scatter_add_(1, at, g)
            if d.dtype != whole.dtype:
                logits.copy_(d)
            gradients.add(chunk, whole, slopes)
            del whole, logits, slopes, d  # so that the next chunk reuses their memory
        dhidden, dweight, dbias = gradients.finish()
        if ctx.shard is not None and dhidden is not None:
            dhidden = ctx.shard.sum(dhidden)
        return dhidden, dweight, dbias, None, None, None
