"""What all metrics have in common."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

# Metrics of which less is better; of all others more is. rejected: mean reward of such answers.
_LOSSES = "loss teacher_loss total_loss discriminator_loss generator_loss".split()
SMALLER_IS_BETTER = frozenset((*_LOSSES, "perplexity", "generator_perplexity", "mse", "rejected"))


class Score(Protocol):
    """Metrics, of which `result` is called once, on every rank. How they are updated is between them and their task."""

    main: str  # the metric by which runs are compared; higher is better, except for SMALLER_IS_BETTER

    def result(self) -> dict[str, float | None]: ...


class Metrics(Score, Protocol):
    """Metrics of logits, batch by batch."""

    def update(self, logits: Tensor, targets: Tensor) -> None: ...


class LossOnly:
    """No metrics beyond the loss and what follows from it. main: "loss", "teacher_loss" or "perplexity"."""

    def __init__(self, main: str = "loss"):
        self.main = main

    def result(self) -> dict[str, float | None]:
        return {}


def ratio(part: float, whole: float) -> float:
    """part / whole, and 0 where there is nothing."""
    return part / whole if whole else 0.0


def f1_score(both: float, predicted: float, actual: float) -> float:
    """From the number of predicted items, of actual ones, and of those that are both."""
    return ratio(2 * both, predicted + actual)


def f1_of_classes(hits: Sequence[int], predicted: Sequence[int], actual: Sequence[int]) -> float:
    """From the counts of each class: of two the F1 of the second, of more the mean over those that occur."""
    scores = [f1_score(*counts) for counts in zip(hits, predicted, actual, strict=True)]
    seen = [score for score, p, a in zip(scores, predicted, actual, strict=True) if p + a]
    return scores[1] if len(scores) == 2 else ratio(sum(seen), len(seen))
