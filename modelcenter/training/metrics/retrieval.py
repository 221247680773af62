"""Metrics of embeddings: retrieval of related texts, and the correlation of similarities with scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from modelcenter.training.metrics.base import ratio
from modelcenter.training.metrics.classification import Regression
from modelcenter.training.metrics.reduce import sums


class Retrieval:
    """ndcg@10, mrr@10, recall@10 and accuracy@1 of queries, as defined by trec_eval and MTEB.

    ndcg@10: the sum of 1 / log2(1 + rank) over the relevant texts among the first ten, divided by the largest possible
    sum. mrr@10: 1 / rank of the first relevant text. recall@10: the share of the relevant texts among the first ten.
    accuracy@1: whether the first text is relevant. All are means over the queries.
    """

    main = "ndcg@10"
    depth = 10

    def __init__(self) -> None:
        self.queries = 0
        self.totals = torch.zeros(4, dtype=torch.float64)

    def update(self, found: Tensor, relevant: Sequence[int]) -> None:
        """Add queries.

        Args:
            found: (n, depth) bool, whether the text at each rank is relevant; depth may be smaller if there are fewer
                texts. relevant: the number of relevant texts of each query.
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
    """spearman and pearson of the similarity of two texts with their score."""

    main = "spearman"

    def result(self) -> dict[str, float | None]:
        found = super().result()
        return {name: found[name] for name in ("spearman", "pearson")}
