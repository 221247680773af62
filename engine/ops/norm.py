"""Norms by the root mean square: on a CPU torch goes over the memory of a row six times for one, and more often in
backward. The compiled operator (csrc/cpu/norm.h) goes over it once, and back twice."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library
from engine.ops.autograd import once_differentiable


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, *saved = _run(x, weight, eps)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factor = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        torch.ops.modelcenter.rms_norm_backward_(dx, dweight, grad.contiguous(), x, weight, factor)
        return dx, dweight, None


def _run(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and what backward takes: x, the weight and the factor of each row."""
    x, weight = x.contiguous(), weight.contiguous()
    out, factor = torch.empty_like(x), x.new_empty(x.numel() // weight.numel())
    torch.ops.modelcenter.rms_norm_(out, factor, x, weight, eps)
    return out, x, weight, factor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 (Zhang and Sennrich 2019,
    arXiv:1910.07467). The factor is rounded to the type of x before the weight multiplies it, as in transformers'
    T5LayerNorm and LlamaRMSNorm.

    Args:
        x: (..., n). weight: (n,).

    Raises:
        ValueError: the rows of x are not as long as the weight.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected that of a row of x, {tuple(x.shape[-1:])}")
    if library.plain_fp32(x, weight) and not torch.compiler.is_compiling() and library.serves(x.device):
        return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _run(x, weight, eps)[0]
    # Rounded once, from fp32, as of a copy in fp32, which backward would keep.
    return F.rms_norm(x, weight.shape, eps=eps) * weight
