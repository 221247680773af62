"""Norms with accurate gradients in 16 bits on a CPU, and one pass over memory on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops import layer_norm, rms_norm

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, but trained in fp32 on a CPU if x has 16 bits.

    There torch sums the gradients of weight and bias over the tokens in 16 bits: in bf16 those of the bias are off by
    a half at 4,096 tokens.
    """

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """(weight, bias, eps) if the module computes exactly what the operator does; else None."""
        if self._widens(x):
            return None
        return self.weight, torch.zeros_like(self.weight) if self.bias is None else self.bias, self.eps

    def forward(self, x: Tensor) -> Tensor:
        if not self._widens(x):
            return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)

    def _widens(self, x: Tensor) -> bool:
        return x.is_cpu and x.dtype in _SIXTEEN_BITS and torch.is_grad_enabled()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def rule(self, x: Tensor) -> tuple[Tensor, None, float]:
        """(weight, no bias, eps) for hidden states x."""
        return self.weight, None, self.eps

    def forward(self, x: Tensor) -> Tensor:
        weight, _, eps = self.rule(x)
        return rms_norm(x, weight, eps)


class WideRMSNorm(RMSNorm):
    """RMSNorm whose product with the weight is rounded only once, as transformers' Olmo2RMSNorm."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in _SIXTEEN_BITS else x
        return rms_norm(wide, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class UnitOffsetRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (1 + weight), computed in fp32, as transformers' GemmaRMSNorm."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def rule(self, x: Tensor) -> tuple[Tensor, None, float] | None:
        """(1 + weight, no bias, eps) if the module computes exactly what the operator does; else None: in 16 bits the
        operator rounds the sum and its factor."""
        return None if x.dtype in _SIXTEEN_BITS else (1 + self.weight.to(x.dtype), None, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in _SIXTEEN_BITS else x
        return rms_norm(wide, 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)
