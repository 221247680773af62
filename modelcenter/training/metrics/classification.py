"""Classification and regression of sequences.

Counts per class are kept, not logits. Definitions are scikit-learn's and scipy's; 0 / 0 is 0 for F1 and MCC and
undefined (None) for correlations.
"""

import math

import torch
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.training.metrics.base import f1_of_classes, f1_score, ratio
from modelcenter.training.metrics.reduce import gather_rows, sum_over_ranks, sums


class SingleLabel:
    """accuracy, f1 (with two classes that of class 1, with more the mean over classes) and mcc (Matthews correlation,
    any number of classes)."""

    main = "accuracy"

    def __init__(self, classes: int, device: torch.device | str = "cpu"):
        # Per class: rows predicted, rows labelled, rows both. int64, because floats stop counting at 2**24 or 2**53.
        self.counts = torch.zeros(3, classes, dtype=torch.int64, device=device)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits (n, classes), targets (n,), -100 where a row has no label."""
        predicted, labelled, classes = logits.argmax(-1), (targets != IGNORE_INDEX).long(), targets.clamp(min=0)
        self.counts[0].index_add_(0, predicted, labelled)
        self.counts[1].index_add_(0, classes, labelled)
        self.counts[2].index_add_(0, classes, labelled * (predicted == targets))

    def result(self) -> dict[str, float | None]:
        predicted, actual, hit = sum_over_ranks(self.counts).tolist()
        rows, right = sum(actual), sum(hit)
        # Gorodkin 2004, as in sklearn.metrics.matthews_corrcoef.
        cov = right * rows - sum(p * a for p, a in zip(predicted, actual, strict=True))
        spread = (rows**2 - sum(p * p for p in predicted)) * (rows**2 - sum(a * a for a in actual))
        return {
            "accuracy": ratio(right, rows),
            "f1": f1_of_classes(hit, predicted, actual),
            "mcc": cov / math.sqrt(spread) if spread else 0.0,
        }


class Accuracy:
    """accuracy only: for multiple choice, where indices are not classes."""

    main = "accuracy"

    def __init__(self) -> None:
        self.rows = [0, 0]  # labelled, right

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits (n, choices), targets (n,), -100 where a row has no label."""
        self.rows[0] += int((targets != IGNORE_INDEX).sum())
        self.rows[1] += int((logits.argmax(-1) == targets).sum())

    def result(self) -> dict[str, float | None]:
        rows, right = sums(self.rows)
        return {"accuracy": ratio(right, rows)}


class MultiLabel:
    """f1 over all decisions (micro), f1_macro (mean over the labels) and accuracy (rows with every label right)."""

    main = "f1"

    def __init__(self, classes: int, device: torch.device | str = "cpu"):
        self.counts = torch.zeros(3, classes, dtype=torch.int64, device=device)
        self.rows = torch.zeros(2, dtype=torch.int64, device=device)  # rows, rows with every label right

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits (n, classes), targets (n, classes) of 0 and 1. A label is predicted if its probability exceeds 0.5."""
        predicted, actual = logits > 0, targets > 0.5
        self.counts += torch.stack([predicted.sum(0), actual.sum(0), (predicted & actual).sum(0)])
        self.rows[0] += len(targets)
        self.rows[1] += (predicted == actual).all(-1).sum()

    def result(self) -> dict[str, float | None]:
        predicted, actual, hit = sum_over_ranks(self.counts).tolist()
        rows, right = sum_over_ranks(self.rows).tolist()
        of_labels = [f1_score(*counts) for counts in zip(hit, predicted, actual, strict=True)]
        return {
            "f1": f1_score(sum(hit), sum(predicted), sum(actual)),
            "f1_macro": ratio(sum(of_labels), len(of_labels)),
            "accuracy": ratio(right, rows),
        }


class Regression:
    """pearson, spearman (their means over the values of a row) and mse. Keeps two floats per row and value.

    Args:
        width: number of values in a row.
    """

    main = "pearson"

    def __init__(self, width: int = 1) -> None:
        self.width = width
        self.pairs: list[Tensor] = []

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits (n, values), targets (n,) or (n, values)."""
        self.pairs.append(torch.stack([logits.double(), targets.reshape(logits.shape).double()], -1).cpu())

    def result(self) -> dict[str, float | None]:
        own = torch.cat(self.pairs) if self.pairs else torch.zeros(0, self.width, 2, dtype=torch.float64)
        predicted, actual = gather_rows(own).unbind(-1)
        columns = list(zip(predicted.T, actual.T, strict=True))
        pearson = [_pearson(p, a) for p, a in columns]
        spearman = [_pearson(_ranks(p), _ranks(a)) for p, a in columns]
        return {
            "pearson": _mean_if_defined(pearson),
            "spearman": _mean_if_defined(spearman),
            "mse": ((predicted - actual) ** 2).mean().item() if len(predicted) else None,
        }


def _mean_if_defined(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _pearson(x: Tensor, y: Tensor) -> float | None:
    x, y = x - x.mean(), y - y.mean()
    norm = (x.norm() * y.norm()).item()
    return (x @ y).item() / norm if norm > 0 else None


def _ranks(values: Tensor) -> Tensor:
    """1-based ranks; equal values share their mean rank. As in scipy, all ranks are NaN if a value is NaN."""
    if values.isnan().any():
        return torch.full_like(values, math.nan)
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]
