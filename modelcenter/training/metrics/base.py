"""The interface of metrics, and functions that several metrics use."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

# Metrics for which lower is better; for all others, higher is better. rejected: mean reward of rejected answers.
_LOSSES = "loss teacher_loss total_loss discriminator_loss generator_loss".split()
SMALLER_IS_BETTER = frozenset((*_LOSSES, "perplexity", "generator_perplexity", "mse", "rejected"))


class Score(Protocol):
    """Metrics whose `result` is called once, on every rank. Their task knows how to update them."""

    main: str  # the metric by which runs are compared; higher is better, except for SMALLER_IS_BETTER

    def result(self) -> dict[str, float | None]: ...


class Metrics(Score, Protocol):
    """Metrics that are updated with the logits of batches."""

    def update(self, logits: Tensor, targets: Tensor) -> None: ...


class LossOnly:
    """No metrics other than the loss and those derived from it. main: "loss", "teacher_loss" or "perplexity"."""

    def __init__(self, main: str = "loss"):
        self.main = main

    def result(self) -> dict[str, float | None]:
        return {}


def ratio(part: float, whole: float) -> float:
    """part / whole; 0 if whole is 0."""
    return part / whole if whole else 0.0


def f1_score(both: float, predicted: float, actual: float) -> float:
    """F1 from the numbers of predicted items, of actual items, and of those that are both."""
    return ratio(2 * both, predicted + actual)


def f1_of_classes(hits: Sequence[int], predicted: Sequence[int], actual: Sequence[int]) -> float:
    """F1 from the counts of each class: of two classes that of the second, of more the mean over those that occur."""
    scores = [f1_score(*counts) for counts in zip(hits, predicted, actual, strict=True)]
    seen = [score for score, p, a in zip(scores, predicted, actual, strict=True) if p + a]
    return scores[1] if len(scores) == 2 else ratio(sum(seen), len(seen))
