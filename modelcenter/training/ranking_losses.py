"""Losses for rerankers: the texts of a row that answer its query better should score higher.

A batch holds its texts row by row, each together with its query. `labels`, fp32 (texts,), says how well each text
answers the query, and `row_texts`, int64 (rows,), is the number of texts in each row. All texts of a row are in one
microbatch, so each loss is a sum over rows, divided by the number of its items in the whole step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from modelcenter.layers.host_copies import host_copy
from modelcenter.layers.packing import in_rows

TEXT_FACTS = ("labels", "row_texts")  # in a batch beside the model's inputs


class RankingLoss(ABC):
    """Base of the losses: a TrainingLoss for a head with one label.

    Attributes:
        lowest, highest: the range of valid labels; None: no limit.
    """

    lowest: ClassVar[float | None] = None
    highest: ClassVar[float | None] = None

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in TEXT_FACTS}

    def counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        if "row_texts" not in batch:  # on a rank without rows
            return {"loss": 0}
        return {"loss": int(self.items(*by_row(batch["labels"], batch["row_texts"])).sum())}

    def __call__(self, out: Any, batch: Mapping[str, Any], totals: Mapping[str, int]) -> Tensor:
        scores = out.logits.float().flatten()
        return self.sum(scores, batch) / max(totals["loss"], 1)

    def sum(self, scores: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The sum over the items of a batch, 0-d.

        Args:
            scores: fp32 (texts,), the output of the model for each text.
        """
        if "row_texts" not in batch:
            return scores.sum()  # 0, with a graph
        labels, there = by_row(batch["labels"], batch["row_texts"])
        return self.sum_of_rows(by_row(scores, batch["row_texts"])[0], labels, there)

    @abstractmethod
    def items(self, labels: Tensor, there: Tensor) -> Tensor:
        """int64 (rows,): the number of items of each row. Arguments: see `sum_of_rows`."""

    @abstractmethod
    def sum_of_rows(self, scores: Tensor, labels: Tensor, there: Tensor) -> Tensor:
        """The sum over the items of some rows.

        Args:
            scores, labels: fp32 (rows, most), each row padded with zeros. there: bool (rows, most), where there is a
                text.
        """


def by_row(values: Tensor, row_texts: Tensor) -> tuple[Tensor, Tensor]:
    """((rows, most) the values of each row's texts, padded with zeros; (rows, most) bool, where there is a text).

    Args:
        values: (texts,). row_texts: int64 (rows,), the number of texts of each row.
    """
    most = int(host_copy(row_texts).max()) if len(row_texts) else 0
    there = torch.arange(most, device=values.device) < row_texts[:, None]
    return in_rows(values, row_texts, most, 0.0), there


class Binary(RankingLoss):
    """The mean over the texts of the binary cross-entropy of score and label, a probability, as BinaryCrossEntropyLoss
    of sentence-transformers."""

    lowest, highest = 0.0, 1.0

    def items(self, labels: Tensor, there: Tensor) -> Tensor:
        return there.sum(1)

    def sum_of_rows(self, scores: Tensor, labels: Tensor, there: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(scores, labels, there.float(), reduction="sum")


class Listwise(RankingLoss):
    """The mean over the rows of the cross-entropy of finding the positive among the row's texts, as BGE's rerankers are
    trained. Several positives are weighted by their shares of the labels' sum. Rows with a single text, or without a
    positive, have no loss."""

    lowest = 0.0

    def items(self, labels: Tensor, there: Tensor) -> Tensor:
        return ((there.sum(1) > 1) & (labels.sum(1) > 0)).long()

    def sum_of_rows(self, scores: Tensor, labels: Tensor, there: Tensor) -> Tensor:
        return _entropy(scores, labels / labels.sum(1, keepdim=True).clamp(min=torch.finfo().tiny), there)


class ListNet(RankingLoss):
    """The mean over the rows of the cross-entropy between the softmax of the labels and that of the scores (Cao et al.
    2007). Rows with a single text have no loss."""

    def items(self, labels: Tensor, there: Tensor) -> Tensor:
        return (there.sum(1) > 1).long()

    def sum_of_rows(self, scores: Tensor, labels: Tensor, there: Tensor) -> Tensor:
        return _entropy(scores, labels.masked_fill(~there, -torch.inf).softmax(1), there)


class Pairwise(RankingLoss):
    """RankNet (Burges et al. 2005): the mean, over all pairs of a row's texts with different labels, of log(1 +
    exp(score of the text with the lower label - score of the other))."""

    def items(self, labels: Tensor, there: Tensor) -> Tensor:
        return self._ordered(labels, there).sum((1, 2))

    def sum_of_rows(self, scores: Tensor, labels: Tensor, there: Tensor) -> Tensor:
        losses = F.softplus(scores[:, None, :] - scores[:, :, None])
        return (losses * self._ordered(labels, there)).sum()

    @staticmethod
    def _ordered(labels: Tensor, there: Tensor) -> Tensor:
        """(rows, most, most) whether the first of two texts has the higher label."""
        return (labels[:, :, None] > labels[:, None, :]) & there[:, :, None] & there[:, None, :]


class MarginMSE(RankingLoss):
    """The mean over all texts of a row but the first of the squared difference between two margins of the first text
    over the other: that of the scores and that of the labels, which are a teacher's scores (Hofstätter et al. 2020,
    arXiv:2010.02666)."""

    def items(self, labels: Tensor, there: Tensor) -> Tensor:
        return there.sum(1) - 1

    def sum_of_rows(self, scores: Tensor, labels: Tensor, there: Tensor) -> Tensor:
        wrong = scores - labels
        return ((wrong[:, :1] - wrong[:, 1:]).square() * there[:, 1:]).sum()


def _entropy(scores: Tensor, targets: Tensor, there: Tensor) -> Tensor:
    """The sum over the rows of the cross-entropy of targets (rows, most), which add up to 1 or are all 0."""
    logs = scores.masked_fill(~there, -torch.inf).log_softmax(1)
    return -(targets * logs.masked_fill(~there, 0.0)).sum()


RANKING_LOSSES: dict[str, type[RankingLoss]] = {  # by their names in flags
    "binary": Binary,
    "listwise": Listwise,
    "listnet": ListNet,
    "pairwise": Pairwise,
    "margin_mse": MarginMSE,
}
