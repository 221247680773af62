"""BMTrain's linear layer."""

from __future__ import annotations

import torch
from torch import nn

from engine import ops
from engine.bmtrain.parameter import DistributedModule, DistributedParameter


class OpLinear:
    """``OpLinear.apply(x, weight, bias)`` is ``x @ weight.T + bias``, differentiable."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., in), weight (out, in), bias (out,) -> (..., out)."""
        return ops.linear(x, weight, bias)


class Linear(DistributedModule):
    """x (..., in_features) -> (..., out_features). ``init_parameters`` draws the weight by xavier_normal_, bias 0."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = DistributedParameter(
            torch.empty(out_features, in_features, dtype=dtype), init_method=nn.init.xavier_normal_
        )
        if bias:
            self.bias = DistributedParameter(torch.empty(out_features, dtype=dtype), init_method=nn.init.zeros_)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input (..., in_features) -> (..., out_features)."""
        return ops.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """The sizes, for ``repr``."""
        bias = self._parameters["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
