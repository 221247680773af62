"""Metrics of preference training (DPO, Rafailov et al. 2023): how often and by how much the chosen answer is ahead."""

import torch
from torch import Tensor

from modelcenter.training.metrics.base import ratio
from modelcenter.training.metrics.reduce import sums


class Preference:
    """accuracy (pairs whose chosen answer has the higher reward), margin, chosen and rejected (mean rewards)."""

    main = "accuracy"

    def __init__(self) -> None:
        self.pairs = [0, 0]  # all, right
        self.totals = torch.zeros(2, dtype=torch.float64)

    def update(self, chosen: Tensor, rejected: Tensor) -> None:
        """The rewards of n pairs, (n,) each: beta times the log-probability minus the reference model's."""
        chosen, rejected = chosen.detach().reshape(-1).double().cpu(), rejected.detach().reshape(-1).double().cpu()
        if chosen.shape != rejected.shape:
            raise ValueError(f"chosen, rejected: got {len(chosen)} and {len(rejected)} rewards, expected pairs")
        self.pairs[0] += len(chosen)
        self.pairs[1] += int((chosen > rejected).sum())
        self.totals += torch.stack([chosen.sum(), rejected.sum()])

    def result(self) -> dict[str, float | None]:
        pairs, right = sums(self.pairs)
        chosen, rejected = sums(self.totals.tolist(), torch.float64)
        return {
            "accuracy": ratio(right, pairs),
            "margin": ratio(chosen - rejected, pairs),
            "chosen": ratio(chosen, pairs),
            "rejected": ratio(rejected, pairs),
        }
