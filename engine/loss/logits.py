"""Losses of given logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss.vocabulary import VocabularyShard
from engine.ops.autograd import once_differentiable

IGNORE_INDEX = -100


def cross_entropy(logits: Tensor, targets: Tensor, count: Tensor | float, *, label_smoothing: float = 0.0) -> Tensor:
    """The sum of the cross-entropies of labelled rows, divided by `count`.

    Args:
        logits: (n, classes). targets: (n,) int64, -100 where there is no label.
    """
    total = F.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=label_smoothing)
    return total / at_least_one(count)


def at_least_one(count: Tensor | float) -> Tensor | float:
    """The divisor for `count` labels: without any, the loss is 0 and not 0 / 0, so empty microbatches add nothing."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


class _ParallelCrossEntropy(torch.autograd.Function):
    """Logits (n, this rank's classes), targets (n,) among all classes -> (n,) fp32, the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, shard: VocabularyShard) -> Tensor:
        at, here = shard.columns(targets, logits.shape[1])
        lse, at_target, mean = shard.reduce(logits.float(), at, here)
        ctx.save_for_backward(logits, lse, at, here)
        ctx.smoothing, ctx.vocab = smoothing, shard.vocab
        return (lse - (1 - smoothing) * at_target).squeeze(1) - smoothing * mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, at, here = ctx.saved_tensors
        out = (logits.float() - lse).exp_()
        if ctx.smoothing:
            out.sub_(ctx.smoothing / ctx.vocab)
        if out.shape[1]:
            out.scatter_add_(1, at, here * (ctx.smoothing - 1.0))
        return (out * grad[:, None]).to(logits.dtype), None, None, None


class FusedCrossEntropy(torch.nn.Module):
    """Cross-entropy with the arguments of BMTrain's and ``torch.nn.CrossEntropyLoss``, computed in fp32 for all dtypes.

    "mean" averages over this rank's labels (weighted, with ``weight``); without labels it is 0, where torch gives nan.

    Args:
        weight: (classes,), a factor for each class of the whole vocabulary. ignore_index: the target of rows without a
            label. reduction: "mean", "sum" or "none". label_smoothing: 0 to 1, as in torch.
        parallel: the input has this rank's classes only: classes are split evenly over the tensor-parallel group, in
            rank order; targets and the result are the same on all of its ranks.

    Raises:
        ValueError: an argument is not one of these.
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
        """input (n, classes), target (n,) integers -> 0-d fp32, or (n,) with reduction "none"."""
        if input.ndim != 2 or target.shape != input.shape[:1]:
            raise ValueError(
                f"input {tuple(input.shape)} and target {tuple(target.shape)} are not (n, classes) and (n,)"
            )
        weight = None if self.weight is None else self.weight.to(input.device, torch.float32)
        target = target.long()
        labelled = target != self.ignore_index
        classes = torch.where(labelled, target, 0)
        if self.parallel and (shard := VocabularyShard.equal(input.shape[1])) is not None:
            shard.check(classes)
            loss = _ParallelCrossEntropy.apply(input, target, self.label_smoothing, shard) * labelled
            if weight is not None:
                if weight.shape[0] != shard.vocab:
                    raise ValueError(f"weight has {weight.shape[0]} classes, but the ranks together have {shard.vocab}")
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
