"""What all metrics have in common."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

# Metrics of which less is better; of all others more is.
SMALLER_IS_BETTER = frozenset({"loss", "perplexity", "mse", "rejected"})  # rejected: mean reward of such answers


class Score(Protocol):
    """What is asked of all metrics, once, on every rank. How they are fed is between them and their task."""

    main: str  # the metric by which runs are compared; higher is better, but for SMALLER_IS_BETTER

    def result(self) -> dict[str, float | None]: ...


class Metrics(Score, Protocol):
    """Metrics of logits, batch by batch."""

    def update(self, logits: Tensor, targets: Tensor) -> None: ...


def ratio(part: float, whole: float) -> float:
    """part / whole, and 0 where there is nothing."""
    return part / whole if whole else 0.0


def f1_of_classes(hits: Sequence[int], predicted: Sequence[int], actual: Sequence[int]) -> float:
    """From the counts of each class: of two the F1 of the second, of more the mean over those that occur."""
    f1 = [ratio(2 * hit, p + a) for hit, p, a in zip(hits, predicted, actual, strict=True)]
    seen = [score for score, p, a in zip(f1, predicted, actual, strict=True) if p + a]
    return f1[1] if len(f1) == 2 else ratio(sum(seen), len(seen))
