"""A loss with class weights, for imbalanced data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.registry import nearest

BALANCED = "balanced"
_ONE = 1 << 20  # weights are multiples of 1 / _ONE, so that their sum over a global batch is computed in integers


class ClassWeightedLoss:
    """A TrainingLoss like torch's cross_entropy with `weight`, over the global batch: the sum of the items' losses,
    each times the weight of its class, divided by the sum of these weights."""

    def __init__(self, weights: Sequence[float], label_smoothing: float = 0.0):
        self.units = torch.tensor([max(1, round(weight * _ONE)) for weight in weights])
        self.smoothing = label_smoothing

    @property
    def weights(self) -> Tensor:
        """The weights, fp32 (classes,)."""
        return self.units.double().div(_ONE).float()

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return dict(batch)

    def counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        labels = batch["labels"]
        return {"loss": int(self.units[labels[labels != IGNORE_INDEX]].sum())}

    def __call__(self, out: Any, batch: Mapping[str, Any], totals: Mapping[str, int]) -> Tensor:
        logits, labels = out.logits.flatten(0, -2).float(), batch["labels"].flatten()
        weights = self.weights.to(logits.device)
        total = F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=self.smoothing)
        return total / (max(totals["loss"], 1) / _ONE)


def parse_class_weights(
    given: Sequence[str], names: Sequence[str], targets: np.ndarray, times: np.ndarray | None = None
) -> list[float]:
    """The weight of each class.

    Args:
        given: ["balanced"]: rows / (classes * rows of the class), and 1 for a class without rows. Or NAME=WEIGHT for
            some classes; the others have 1.
        names: of the classes. targets: int64, the classes of all rows.
        times: how often an epoch of a mixture draws each row; None: once.

    Raises:
        ValueError: a class is unknown or has two weights, or a weight is not a number above 0.
    """
    if list(given) == [BALANCED]:
        counts = np.bincount(targets, times, minlength=len(names))
        return [len(targets) / (len(names) * n) if n else 1.0 for n in counts.tolist()]
    weights: dict[str, float] = {}
    for entry in given:
        name, _, value = entry.rpartition("=")
        if name not in names or name in weights:
            problem = (
                "twice" if name in weights else f"no class.{nearest(name, names)} They are {', '.join(names[:12])}"
            )
            raise ValueError(
                f"class_weights: got {entry!r}, {name or entry!r} is {problem}; expected balanced or NAME=WEIGHT"
            )
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = 0.0
        if not 0 < weights[name] < 1e6:
            raise ValueError(
                f"class_weights: got {entry!r}, expected a number above 0 and below 1000000 after the name"
            )
    return [weights.get(name, 1.0) for name in names]
