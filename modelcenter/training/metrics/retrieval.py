"""Embeddings: how well texts are found by the texts that they belong to, and how well likeness follows scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from modelcenter.training.metrics.base import ratio
from modelcenter.training.metrics.classification import Regression
from modelcenter.training.metrics.reduce import sums


class Retrieval:
    """ndcg@10, mrr@10, recall@10 and accuracy@1 of queries, after the definitions of trec_eval and MTEB.

    ndcg@10: the sum of 1 / log2(1 + rank) over the texts found among the first ten that belong to the query, over the
    greatest such sum. mrr@10: 1 / rank of the first. recall@10: their share of all that belong to it. accuracy@1:
    whether the first does. Each is the mean over the queries.
    """

    main = "ndcg@10"
    depth = 10

    def __init__(self) -> None:
        self.queries = 0
        self.totals = torch.zeros(4, dtype=torch.float64)

    def update(self, found: Tensor, relevant: Sequence[int]) -> None:
        """Add queries.

        Args:
            found: (n, depth) bool, whether the text at each rank belongs to the query; fewer columns where there are
                fewer texts. relevant: of each query, how many do.
        """
        found, count = found.double().cpu(), torch.tensor(relevant, dtype=torch.float64)
        ranks = torch.arange(1, found.shape[1] + 1, dtype=torch.float64)
        gains = 1 / torch.log2(1 + ranks)
        best = torch.tensor([0.0, *gains.cumsum(0).tolist()], dtype=torch.float64)
        most = count.clamp(max=len(ranks)).long()
        self.queries += len(found)
        self.totals += torch.stack(
            [
                ((found * gains).sum(1) / best[most]).sum(),
                (found / ranks).amax(1).sum(),
                (found.sum(1) / count).sum(),
                found[:, 0].sum(),
            ]
        )

    def result(self) -> dict[str, float | None]:
        (queries,), totals = sums([self.queries]), sums(self.totals.tolist(), torch.float64)
        names = (f"ndcg@{self.depth}", f"mrr@{self.depth}", f"recall@{self.depth}", "accuracy@1")
        return {name: ratio(total, queries) for name, total in zip(names, totals, strict=True)}


class Likeness(Regression):
    """spearman and pearson of the likeness of two texts with their score."""

    main = "spearman"

    def result(self) -> dict[str, float | None]:
        found = super().result()
        return {name: found[name] for name in ("spearman", "pearson")}
