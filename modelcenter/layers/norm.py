"""Norms whose gradients are right in 16 bits on a CPU too, and are one pass over memory on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops import rms_norm
from engine.ops.norm import layer_norm

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class LayerNorm(nn.LayerNorm):
    """torch's, but on a CPU trained by way of fp32 where x has 16 bits.

    There torch adds the gradients of weight and bias up over the tokens in 16 bits: in bf16 those of the bias are off
    by a half at 4,096 tokens.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu or x.dtype not in _SIXTEEN_BITS or not torch.is_grad_enabled():
            return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
