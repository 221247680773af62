"""Distillation: a teacher's predictions for the rows of a vocabulary head as part of the loss (Hinton et al. 2015,
arXiv:1503.02531).

For a row z of the student's logits, u of the teacher's and a temperature T, the loss is T^2 KL(softmax(u / T) ||
softmax(z / T)). Its gradient with respect to z, T (softmax(z / T) - softmax(u / T)), is about equally large for all T.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.loss.chunks import ChunkedHead, widened
from engine.loss.vocabulary import VocabularyShard
from engine.ops import matmul_nt, soft_capped
from engine.ops.autocast import as_factors
from engine.ops.cross_entropy import losses_


@dataclass(frozen=True, eq=False)
class SoftTargets:
    """A teacher's predictions for n rows: the tensors from which its logits are computed, one chunk of rows at a time.

    Classes with the same number are the same for teacher and student. Classes that only one of them has, such as the
    padding of a vocabulary, have probability 0 for the teacher.

    Attributes:
        hidden: (n, the teacher's hidden_size). weight: (the teacher's vocab_size, its hidden_size), whole on each rank.
            bias: (its vocab_size,) or None. They receive no gradients.
        share: the share of this loss, above 0 and at most 1; the rest is cross-entropy. temperature: above 0.
        cap: soft cap of the teacher's logits, see linear_cross_entropy.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    share: float
    temperature: float
    cap: float | None = None

    def check(self, rows: int) -> None:
        """Raise ValueError for another number of rows."""
        if self.hidden.shape[0] != rows:
            raise ValueError(
                f"soft_targets: got the teacher's predictions of {self.hidden.shape[0]} tokens, expected those of the "
                f"{rows} that have a label"
            )

    def detached(self) -> SoftTargets:
        """These predictions, detached from the graph."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)


class TaughtLosses:
    """Both losses of chunks of a student's logits, and the gradient of their weighted sum.

    Args:
        head: the student's head for this rank's classes. shard: which classes these are; None: all.
    """

    def __init__(self, soft: SoftTargets, head: ChunkedHead, shard: VocabularyShard | None) -> None:
        first = 0 if shard is None else shard.first
        own = slice(first, first + head.classes)
        bias = None if soft.bias is None else soft.bias[own]
        self._hidden, weight, bias = as_factors(soft.hidden, soft.weight[own], bias)
        self._known = weight.shape[0]  # classes of this rank that the teacher has too, the first ones
        self._weight, self._bias = widened(self._hidden, weight, bias)
        self._share, self._temperature, self._cap, self._shard = soft.share, soft.temperature, soft.cap, shard

    def of_(
        self, logits: Tensor, targets: Tensor, chunk: slice, count: Tensor | float, smoothing: float, train: bool
    ) -> Tensor:
        """The sums of the cross-entropies and of T^2 KL over the rows of a chunk, (2,) fp32.

        Args:
            logits: (rows, this rank's classes), the student's; with `train` they are overwritten by the gradient of the
                weighted sum / count. targets: (rows,), numbers among all classes.
        """
        z, t, shard = logits.float(), self._temperature, self._shard
        vocab = logits.shape[1] if shard is None else shard.vocab
        if shard is None:
            at, here = targets[:, None], torch.ones_like(targets[:, None], dtype=torch.bool)
        else:
            at, here = shard.columns(targets, logits.shape[1])
        sums = self._sums(z, at, here, smoothing)
        log_q = z / t  # log-probabilities of the student, q; of the teacher, p
        log_q -= sums[0] if t == 1 else self._lse(log_q)
        u = matmul_nt(self._hidden[chunk], self._weight, self._bias)[:, : self._known].float()
        log_p = (u if self._cap is None else soft_capped(u, self._cap)) / t
        log_p -= self._lse(log_p)
        p = log_p.exp()
        divergence = log_p.sub_(log_q[:, : self._known]).mul_(p).sum(1)
        if shard is not None:
            divergence = shard.sum(divergence)
        in_place = z is logits
        losses = losses_(z, at, sums, 1, smoothing, train, vocab, here)
        if train:
            z.mul_(1 - self._share).add_(log_q.exp_(), alpha=self._share * t)
            z[:, : self._known].sub_(p, alpha=self._share * t)
            torch.div(z, count, out=z if in_place else logits)
        return torch.stack((losses.sum(), t * t * divergence.sum()))

    def _sums(self, logits: Tensor, at: Tensor, here: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """As VocabularyShard.reduce, also for a vocabulary that is not split; there the mean is None if not needed."""
        if self._shard is not None:
            return self._shard.reduce(logits, at, here)
        mean = logits.mean(1) if smoothing else None
        return torch.logsumexp(logits, 1, keepdim=True), logits.gather(1, at), mean

    def _lse(self, logits: Tensor) -> Tensor:
        """logsumexp (n, 1) over the vocabulary."""
        if self._shard is None:
            return torch.logsumexp(logits, 1, keepdim=True)
        at = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
        return self._shard.reduce(logits, at, torch.zeros_like(at, dtype=torch.bool))[0]
