"""The linear layer: torch's nn.Linear, computed by engine.ops."""

from typing import Any

import torch
from torch import Tensor, nn

from engine.ops import Activation, is_just, linear, linear_activated, linears


class Linear(nn.Linear):
    """x (..., in_features) -> (..., out_features).

    first_row: the index of its first output, if the layer is split over ranks (engine.parallel.tensor).
    """

    first_row = 0

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def each(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """layer(x) for several layers, in training by one operator if all are plain `Linear` layers."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tuple(layer(x) for layer in layers)
    plain = [layer for layer in layers if is_just(layer, Linear)]
    if len(plain) < len(layers):
        return tuple(layer(x) for layer in layers)
    return linears(x, [(layer.weight, layer.bias) for layer in plain])


def activated(x: Tensor, layer: nn.Module, activation: Activation) -> Tensor:
    """activation(layer(x)), in training by one operator if the layer is a plain `Linear`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and is_just(layer, Linear):
        return linear_activated(x, layer.weight, layer.bias, activation)
    return activation(layer(x))


def inner(layer: nn.Module) -> Any:
    """The layer without a low-rank update around it."""
    return layer if type(layer) is Linear else getattr(layer, "base_layer", layer)


def first_output(layer: nn.Module) -> int:
    """The index of the layer's first output in the whole layer, of which tensor parallelism leaves a part."""
    return getattr(inner(layer), "first_row", 0)
