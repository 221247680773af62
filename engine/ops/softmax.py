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
        logits: (n, classes) fp32; with `train` the gradient of the losses' sum / count takes their place, else they
            are as before. targets: (n,) int64, classes of the rows.
    """
    if library.plain_fp32(logits) and library.serves(logits.device):
        loss = logits.new_empty(logits.shape[0])
        scale = 1.0 / float(count)
        torch.ops.modelcenter.cross_entropy_(logits, loss, targets.contiguous(), scale, smoothing, train)
        return loss
    at, lse = targets[:, None], torch.logsumexp(logits, -1, keepdim=True)
    loss = (lse - logits.gather(1, at)).squeeze(1) * (1 - smoothing)
    if smoothing:
        loss = loss + (lse.squeeze(1) - logits.mean(1)) * smoothing
    if train:
        logits.sub_(lse).exp_()  # softmax
        if smoothing:
            logits.sub_(smoothing / logits.shape[1])
        logits.scatter_add_(1, at, logits.new_full((), smoothing - 1).expand_as(at)).div_(count)
    return loss
