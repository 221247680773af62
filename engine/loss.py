"""Cross-entropy, once: labelled positions only, in chunks of vocabulary logits, summed and divided by a given count.

The count is that of the whole global batch, so a gradient does not depend on how the batch is cut into microbatches and
ranks. Vocabulary logits exist for one chunk of positions at a time; their gradient is taken in the forward pass, where
the logits still are, as the only thing that backward adds is a scalar factor.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import matmul_nt

IGNORE_INDEX = -100
# Bytes of one chunk of logits. Larger gains nothing on CPU or GPU once the matrix product is efficient.
_CHUNK_BYTES = 64 << 20


def cross_entropy(logits: Tensor, targets: Tensor, count: Tensor | float, *, label_smoothing: float = 0.0) -> Tensor:
    """Sum of cross-entropies over the labelled rows / count.

    Args:
        logits: (n, classes). targets: (n,) int64, -100 where there is no label. count: what the sum is divided by.
    """
    total = F.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=label_smoothing)
    return total / _at_least_one(count)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    count: Tensor | float,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, targets, count) without ever holding all logits.

    Args:
        hidden: (n, hidden_size), labelled or not. weight: (vocab_size, hidden_size). bias: (vocab_size,) or None.
        targets: (n,) int64, -100 where there is no label; those rows cost nothing.
    """
    labelled = (targets != IGNORE_INDEX).nonzero().flatten()
    if labelled.numel() != targets.numel():
        hidden, targets = hidden.index_select(0, labelled), targets.index_select(0, labelled)
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, _at_least_one(count), label_smoothing)


def _at_least_one(count: Tensor | float) -> Tensor | float:
    """A batch without labels has loss 0, not 0 / 0: a rank with an empty microbatch adds nothing."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


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
    ) -> Tensor:
        vocab = weight.shape[0]
        rows = max(1, _CHUNK_BYTES // (4 * vocab))
        train = any(ctx.needs_input_grad[:3])
        total = hidden.new_zeros((), dtype=torch.float32)
        dhidden = torch.empty_like(hidden) if train else None
        # No rows: the gradient is zero, but weight still takes part (another rank may have rows).
        dweight = torch.zeros_like(weight) if train and not hidden.shape[0] else None
        dbias = torch.zeros_like(bias) if train and bias is not None else None
        for start in range(0, hidden.shape[0], rows):
            h, t = hidden[start : start + rows], targets[start : start + rows, None]
            logits = matmul_nt(h, weight, bias).float()
            lse = torch.logsumexp(logits, -1, keepdim=True)
            at_target = logits.gather(1, t)
            total += (lse - at_target).sum() * (1 - smoothing)
            if smoothing:
                total += (lse.squeeze(1) - logits.mean(1)).sum() * smoothing
            if not train:
                continue
            grad = logits.sub_(lse).exp_()  # softmax, in place of the logits
            if smoothing:
                grad.sub_(smoothing / vocab)
            grad.scatter_add_(1, t, grad.new_full((), smoothing - 1).expand_as(t))
            grad = grad.div_(count).to(hidden.dtype)
            assert dhidden is not None
            dhidden[start : start + rows] = matmul_nt(grad, weight.t())
            part = matmul_nt(grad.t(), h.t())
            dweight = part if dweight is None else dweight.add_(part)
            if dbias is not None:
                dbias += grad.sum(0)
        if train:
            ctx.save_for_backward(dhidden, dweight, dbias)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight, dbias = ctx.saved_tensors
        if grad.device.type != "cpu" or grad.item() != 1.0:  # reading a scalar costs nothing on a CPU
            dhidden, dweight, dbias = (None if g is None else g * grad.to(g.dtype) for g in (dhidden, dweight, dbias))
        return dhidden, dweight, dbias, None, None, None


class FusedCrossEntropy(torch.nn.Module):
    """Cross-entropy with the words of BMTrain and ``torch.nn.CrossEntropyLoss``, in fp32 whatever the logits are.

    "mean" is over this rank's labels (weighted, with ``weight``); without any label it is 0, where torch gives nan.

    Args:
        weight: (classes,), a factor for each class. ignore_index: the target that is no label.
        reduction: "mean", "sum" or "none". label_smoothing: 0 to 1, as in torch.

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
        if parallel:
            raise ValueError("parallel=True needs tensor parallelism, which this version does not have: leave it out")
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input (n, classes), target (n,) of whole numbers -> 0-d fp32, or (n,) with reduction "none"."""
        if input.ndim != 2 or target.shape != input.shape[:1]:
            raise ValueError(
                f"input {tuple(input.shape)} and target {tuple(target.shape)} are not (n, classes) and (n,)"
            )
        weight = None if self.weight is None else self.weight.to(input.device, torch.float32)
        target = target.long()
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
        labelled = target != self.ignore_index
        if weight is None:
            return loss / labelled.sum().clamp(min=1)
        count = torch.where(labelled, weight[torch.where(labelled, target, 0)], 0.0).sum()
        return loss / torch.where(count > 0, count, 1.0)
