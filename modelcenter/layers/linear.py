"""The linear layer: torch's nn.Linear, computed by engine.ops."""

from typing import Any

from torch import Tensor, nn

from engine.ops import linear


class Linear(nn.Linear):
    """x (..., in_features) -> (..., out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def inner(layer: nn.Module) -> Any:
    """The layer itself, where a low-rank update is around it."""
    return getattr(layer, "base_layer", layer)


def first_output(layer: nn.Module) -> int:
    """Which of the whole layer's outputs is the first of this one, a part of it under tensor parallelism."""
    return getattr(inner(layer), "first_row", 0)
