"""Cross-entropy of rows of logits; its gradient overwrites the logits. The compiled operator (csrc/cpu/loss.h,
csrc/cuda/loss.cu) works on a row while it is in the nearest caches; torch passes over all rows some ten times."""

import torch
from torch import Tensor

from engine.ops import library
from engine.torch_compat import in_function_transform

_16_BITS = (torch.bfloat16, torch.float16)


def cross_entropy_(
    logits: Tensor, targets: Tensor, count: Tensor | float, smoothing: float = 0.0, train: bool = True
) -> Tensor:
    """(n,) fp32, for each row (1 - smoothing) (lse - logit of the target) + smoothing (lse - mean of the logits).

    Computed in fp32 for all dtypes; the gradient of 16-bit logits is rounded once.

    Args:
        logits: (n, classes) fp32, bf16 or fp16, with contiguous rows. With `train` they are overwritten by the gradient
            of sum(losses) / count, else unchanged. targets: (n,) int64, the class of each row.

    Raises:
        IndexError, RuntimeError: a target is not a class. On a GPU nothing waits for this check: it is a device-side
            assertion, as torch's.
    """
    if _is_compiled(logits):
        loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
        on_device = isinstance(count, Tensor) and not logits.is_cpu and count.device == logits.device
        divisor, scale = (count.float(), 1.0) if on_device else (None, 1.0 / float(count))  # type: ignore[union-attr]
        library.operator("cross_entropy_")(
            logits, loss, targets.contiguous(), divisor, scale, smoothing, train, library.stream(logits.device)
        )
        return loss
    if logits.dtype in _16_BITS:
        wide = logits.float()
        loss = cross_entropy_(wide, targets, 1, smoothing, train)
        if train:
            torch.div(wide, count, out=logits)
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


def _is_compiled(logits: Tensor) -> bool:
    """Whether the compiled operator takes these logits."""
    if library.plain_fp32(logits):
        return library.serves(logits.device)
    if logits.is_cpu and type(logits) is not Tensor:
        return False
    if logits.dtype not in (torch.float32, *_16_BITS) or not logits.numel() or hasattr(logits, "placements"):
        return False
    if torch.compiler.is_compiling() or in_function_transform():
        return False
    return library.serves(logits.device)


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
    """The losses (n,) of `cross_entropy_`, from logits (n, columns) of a part of the classes.

    Args:
        at: (n, 1), the column of the target. hit: (n, 1), whether the target is in this part. sums: over all classes
            lse (n, 1), the logit of the target (n, 1) and, with smoothing, the mean (n,).
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
    """Turn the softmax (n, columns) into the gradient of sum(losses) / count, in place. hit: None: all hit."""
    if smoothing:
        softmax.sub_(smoothing / classes)
    if softmax.shape[1]:
        less = softmax.new_full((), smoothing - 1).expand_as(at)
        softmax.scatter_add_(1, at, less if hit is None else less * hit)
    if isinstance(count, Tensor) or count != 1:
        softmax.div_(count)
