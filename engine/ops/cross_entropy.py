"""Cross-entropy of rows of logits and its gradient, which takes their place. The compiled operator (csrc/cpu/loss.h)
goes over a row while it is in the nearest caches; torch goes over all rows some ten times."""

import torch
from torch import Tensor

from engine.ops import library


def cross_entropy_(
    logits: Tensor, targets: Tensor, count: Tensor | float, smoothing: float = 0.0, train: bool = True
) -> Tensor:
    """(n,) fp32: (1 - smoothing) (lse - logit of the target) + smoothing (lse - mean of the logits), of each row.

    Args:
        logits: (n, classes) fp32, whose rows are contiguous; with `train` the gradient of the losses' sum / count takes
            their place, else they are as before. targets: (n,) int64, classes of the rows.
    """
    if library.plain_fp32(logits) and library.serves(logits.device):
        loss = logits.new_empty(logits.shape[0])
        scale = 1.0 / float(count)
        torch.ops.modelcenter.cross_entropy_(logits, loss, targets.contiguous(), scale, smoothing, train)
        return loss
    at = targets[:, None]
    logs = torch.log_softmax(logits, 1)
    loss = -logs.gather(1, at).squeeze(1)
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * logs.mean(1)
    if train:
        torch.exp(logs, out=logits)
        _to_gradient(logits, at, count, smoothing, logits.shape[1])
    return loss


def losses_(
    logits: Tensor,
    at: Tensor,
    sums: tuple[Tensor, Tensor, Tensor | None],
    count: Tensor | float,
    smoothing: float,
    train: bool,
    classes: int,
    hit: Tensor,
) -> Tensor:
    """The losses (n,) of `cross_entropy_`, from logits (n, columns) of some of the classes.

    Args:
        at: (n, 1) the column of the target. hit: (n, 1) whether it is among these. sums: over all classes lse (n, 1),
            the logit of the target (n, 1) and, where there is smoothing, the mean (n,).
    """
    lse, at_target, mean = sums
    loss = (lse - at_target).squeeze(1) * (1 - smoothing)
    if mean is not None and smoothing:
        loss = loss + (lse.squeeze(1) - mean) * smoothing
    if train:
        _to_gradient(logits.sub_(lse).exp_(), at, count, smoothing, classes, hit)
    return loss


def _to_gradient(
    softmax: Tensor, at: Tensor, count: Tensor | float, smoothing: float, classes: int, hit: Tensor | None = None
) -> None:
    """Softmax (n, columns) -> the gradient of the losses' sum / count, in its place. hit: None: each target is here."""
    if smoothing:
        softmax.sub_(smoothing / classes)
    if softmax.shape[1]:
        less = softmax.new_full((), smoothing - 1).expand_as(at)
        softmax.scatter_add_(1, at, less if hit is None else less * hit)
    if isinstance(count, Tensor) or count != 1:
        softmax.div_(count)
