"""The dense layers that may follow the pooling in an embedding model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelcenter.layers.linear import Linear

# With torch.nn's default arguments.
DENSE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
}


class DenseLayer(nn.Module):
    """activation(linear(x)), with `residual` + x: (n, inputs) -> (n, width). After Dense of sentence-transformers."""

    def __init__(self, inputs: int, width: int, activation: str, bias: bool, residual: bool):
        super().__init__()
        self.linear = Linear(inputs, width, bias)
        self.activation, self.adds_input = DENSE_ACTIVATIONS[activation], residual
        self.residual = Linear(inputs, width, bias=False) if residual and inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.activation(self.linear(x))
        if not self.adds_input:
            return out
        return out + (x if self.residual is None else self.residual(x))


class DenseLayers(nn.ModuleDict):
    """Dense layers, one after another: (n, inputs) -> (n, the width of the last).

    Args:
        settings: {name: EmbeddingSettings.dense's}, in order.
    """

    def __init__(self, inputs: int, settings: Mapping[str, Any]):
        layers = {}
        for name, of in settings.items():
            layers[name] = DenseLayer(inputs, of.width, of.activation, of.bias, of.residual)
            inputs = of.width
        super().__init__(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = layer(x)
        return x
