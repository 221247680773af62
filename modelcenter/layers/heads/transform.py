"""A transform that some models apply before any head."""

from torch import Tensor, nn

from modelcenter.layers.linear import Linear, activated
from modelcenter.layers.mlp import ACTIVATIONS
from modelcenter.layers.norm import LayerNorm


class HeadTransform(nn.Module):
    """norm(activation(dense(x))). x: (..., hidden_size) -> the same."""

    def __init__(self, hidden_size: int, activation: str, norm_eps: float, *, bias: bool, norm_bias: bool):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.dense = Linear(hidden_size, hidden_size, bias)
        self.norm = LayerNorm(hidden_size, norm_eps, bias=norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(activated(x, self.dense, self.activation))
