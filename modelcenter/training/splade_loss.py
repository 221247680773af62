"""The loss of sparse embeddings: that of embeddings, and a regularisation that lets few tokens have a weight."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelcenter.layers.host_copies import to_device
from modelcenter.training.contrastive import ANCHOR, EmbeddingLoss
from modelcenter.training.sparse_rows import SparseRows


class SpladeLoss:
    """A ranking loss plus the FLOPS regularisation of queries and of documents (Paria et al. 2020, arXiv:2004.05665): a
    weight times the sum over the vocabulary of the squared mean weight over all queries, and over all documents, of a
    global batch, as SpladeLoss of sentence-transformers.

    Args:
        ranking: the loss of the embeddings. query_weight, document_weight: of anchors; of positives and negatives.

    Attributes:
        factor: of both weights in training, which rises from 0 to 1 in the first steps.
    """

    def __init__(self, ranking: EmbeddingLoss, query_weight: float = 0.0, document_weight: float = 0.0) -> None:
        self.ranking, self.factor = ranking, 1.0
        self._weights = {True: query_weight, False: document_weight}

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self.ranking.inputs(batch)

    def counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        return self.ranking.counts(batch)

    def facts(self, batch: Mapping[str, Any]) -> Tensor:
        return self.ranking.facts(batch)

    def outputs(self, out: Any) -> Tensor:
        return self.ranking.outputs(out)

    def share(self, outputs: Tensor, facts: Tensor, own: slice, gradient: bool = True) -> tuple[Tensor, Tensor]:
        """See joint_loss.JointLoss."""
        value, gradients = self.ranking.share(outputs, facts, own, gradient)
        for weight, mean, mine in self._means(facts, own):
            factors = to_device(torch.stack([mean, mine]).to(outputs.dtype), outputs.device)
            means = factors @ outputs  # of all texts, and this rank's part of it
            value = value + self.factor * weight * means.prod(0).sum()
            if gradient:
                gradients.addmm_(factors[1:].T, means[:1], alpha=2 * self.factor * weight)
        return value, gradients

    def value(self, outputs: SparseRows, facts: Tensor, own: slice) -> Tensor:
        """A rank's share of the loss with the full weights, without its gradient. outputs: (N, width)."""
        value = self.ranking.value(outputs, facts, own)
        for weight, mean, mine in self._means(facts, own):
            value = value + weight * (outputs.weighted_sum(mine) @ outputs.weighted_sum(mean))
        return value

    def _means(self, facts: Tensor, own: slice) -> list[tuple[float, Tensor, Tensor]]:
        """(weight, factors (N,) of the texts in their mean, the same of a rank's own texts alone) of queries and of
        documents."""
        found = []
        for queries, weight in self._weights.items():
            chosen = (facts[:, 0] == ANCHOR) == queries
            count = int(chosen.sum())
            if weight and count:
                mean = chosen.double() / count
                mine = torch.zeros_like(mean)
                mine[own] = mean[own]
                found.append((weight, mean, mine))
        return found


def warmup_factor(step: int, steps: int, warmup: float) -> float:
    """The factor of the weights in a step, from 0: the square of the share of the warm-up that is over.

    Args:
        steps: of the whole run. warmup: steps, or below 1 a fraction of them.
    """
    length = max(1, int(steps * warmup if warmup < 1 else warmup)) if warmup else 0
    return min(1.0, step / length) ** 2 if length else 1.0
