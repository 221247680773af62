"""The linear layer: torch's nn.Linear, computed by engine.ops."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from engine.ops import linear, linears


class Linear(nn.Linear):
    """x (..., in_features) -> (..., out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def together(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """What each of these layers makes of x (n, in_features); on a GPU as one product, unless something else happens in
    or around one of them, such as a low-rank update or a hook."""
    if x.is_cuda and all(map(_is_bare, layers)):
        return linears(x, [(layer.weight, layer.bias) for layer in layers])  # type: ignore[misc]
    return [layer(x) for layer in layers]


def _is_bare(layer: nn.Module) -> bool:
    around = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is Linear and not any(around) and "forward" not in vars(layer)


def inner(layer: nn.Module) -> Any:
    """The layer itself, where a low-rank update is around it."""
    return getattr(layer, "base_layer", layer)


def first_output(layer: nn.Module) -> int:
    """Which of the whole layer's outputs is the first of this one, a part of it under tensor parallelism."""
    return getattr(inner(layer), "first_row", 0)
