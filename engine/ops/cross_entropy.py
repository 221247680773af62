"""Cross-entropy of rows of logits and its gradient, which takes their place. The compiled operator (csrc/cpu/loss.h,
csrc/cuda/loss.cu) goes over a row while it is in the nearest caches; torch goes over all rows some ten times."""

import torch
from torch import Tensor

from engine.ops import library
from engine.torch_compat import in_function_transform

_16_BITS = (torch.bfloat16, torch.float16)


def cross_entropy_(
    logits: Tensor, targets: Tensor, count: Tensor | float, smoothing: float = 0.0, train: bool = True
) -> Tensor:
    """(n,) fp32: (1 - smoothing) (lse - logit of the target) + smoothing (lse - mean of the logits), of each row.

    It is computed in fp32, also where the logits are not; the gradient is then rounded once.

    Args:
        logits: (n, classes) of fp32, bf16 or fp16, whose rows are contiguous; with `train` the gradient of the losses'
            sum / count takes their place, else they are as before. targets: (n,) int64, classes of the rows.

    Raises:
        IndexError, RuntimeError: a target is none of the classes; on a GPU, where nothing waits for it, an assertion of
            the device, as torch's.
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
