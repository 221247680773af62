"""Metrics of rerankers: the order of texts for their queries, and how well scores separate right and wrong pairs."""

import torch
from torch import Tensor

from modelcenter.training.metrics.base import ratio
from modelcenter.training.metrics.reduce import gather_rows, sums


class Ranking:
    """ndcg@10, mrr@10 and map of the texts of each query, ordered by score, as defined by trec_eval.

    ndcg@10: the sum of relevance / log2(1 + rank) over the first ten texts, divided by the largest possible sum.
    mrr@10: 1 / rank of the first relevant text among them. map: the mean over the relevant texts of the precision down
    to each. All are means over the queries, without those whose texts are all equally relevant. Among texts with equal
    scores the less relevant come first, so that constant scores gain nothing.
    """

    main = "ndcg@10"
    depth = 10

    def __init__(self) -> None:
        self.queries = 0
        self.totals = torch.zeros(3, dtype=torch.float64)

    def update(self, scores: Tensor, relevance: Tensor, there: Tensor) -> None:
        """Add queries.

        Args:
            scores, relevance: (queries, most), of the texts of each query, valid where `there` is True. A text is
                relevant if its relevance is above 0; it is never below.
        """
        if not len(there):
            return
        relevance = relevance.double().masked_fill(~there, 0.0)
        least = relevance.masked_fill(~there, torch.inf).amin(1)
        told = relevance.amax(1) > least
        scores, relevance, there = scores.double()[told], relevance[told], there[told]
        scores = scores.nan_to_num(nan=-torch.inf).masked_fill(~there, -torch.inf)
        order = relevance.argsort(dim=1, stable=True)
        order = order.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True))
        gains, best = relevance.gather(1, order), relevance.sort(1, descending=True).values
        ranks = torch.arange(1, relevance.shape[1] + 1, dtype=torch.float64)
        discounts = (1 / torch.log2(1 + ranks)) * (ranks <= self.depth)
        hits = (gains > 0).double()
        found = hits.cumsum(1) / ranks
        self.queries += len(relevance)
        self.totals += torch.stack(
            [
                ((gains * discounts).sum(1) / (best * discounts).sum(1)).sum(),
                (hits * (ranks <= self.depth) / ranks).amax(1).sum(),
                ((found * hits).sum(1) / hits.sum(1)).sum(),
            ]
        )

    def result(self) -> dict[str, float | None]:
        (queries,), totals = sums([self.queries]), sums(self.totals.tolist(), torch.float64)
        names = (f"ndcg@{self.depth}", f"mrr@{self.depth}", "map")
        return {name: total / queries if queries else None for name, total in zip(names, totals, strict=True)}


class PairLabels:
    """average_precision of the pairs, ordered by score, and accuracy: the share of pairs whose probability is on the
    right side of 0.5. Definitions are scikit-learn's. Keeps two floats per pair."""

    main = "average_precision"

    def __init__(self) -> None:
        self.pairs: list[Tensor] = []

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """scores: (n,) logits; labels: (n,) 0 or 1."""
        self.pairs.append(torch.stack([scores.double(), labels.double()], 1).cpu())

    def result(self) -> dict[str, float | None]:
        own = torch.cat(self.pairs) if self.pairs else torch.zeros(0, 2, dtype=torch.float64)
        scores, labels = gather_rows(own).unbind(1)
        right = ((scores > 0) == (labels > 0)).sum().item()
        return {"average_precision": _average_precision(scores, labels), "accuracy": ratio(right, len(labels))}


def _average_precision(scores: Tensor, labels: Tensor) -> float | None:
    """The sum over the distinct scores, from the highest down, of the precision down to that score times the share of
    right pairs that it adds; None: there are no right pairs, or a score is NaN."""
    if not labels.any() or scores.isnan().any():
        return None
    values, place = torch.unique(-scores, return_inverse=True)
    count = torch.zeros(len(values), dtype=torch.float64).index_add_(0, place, torch.ones_like(labels))
    right = torch.zeros_like(count).index_add_(0, place, labels)
    precision = right.cumsum(0) / count.cumsum(0)
    return ((precision * right).sum() / right.sum()).item()
