"""The linear layer: torch's nn.Linear, computed by engine.ops."""

from torch import Tensor, nn

from engine.ops import linear


class Linear(nn.Linear):
    """x (..., in_features) -> (..., out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def first_output(layer: nn.Module) -> int:
    """Which of the whole layer's outputs is the first of this one, a part of it under tensor parallelism."""
    return getattr(layer, "first_row", 0)
