"""The linear layer: torch's nn.Linear, computed by engine.ops."""

from torch import Tensor, nn

from engine.ops import linear


class Linear(nn.Linear):
    """x (..., in_features) -> (..., out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
