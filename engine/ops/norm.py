"""Norms of rows.

Of norms by the root mean square, torch goes over the memory of a row six times on a CPU, and more often in backward.
The compiled operator (csrc/cpu/norm.h) goes over it once, and back twice. On a GPU those of csrc/cuda/rows.cu read a
row once for the result, and once for all gradients, where torch reads it again for each of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library
from engine.ops.autograd import once_differentiable

_LONGEST = 8192  # row that csrc/cuda/rows.cu holds in registers


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


class _RMSNormRows(torch.autograd.Function):
    """On a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, stats = library.operator("rms_norm_rows")(x, weight, eps, library.stream(x.device))
        ctx.save_for_backward(x, weight, stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, stats = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        dx, dweight = library.operator("rms_norm_rows_backward")(
            grad, x, weight, stats, need_weight, library.stream(x.device)
        )
        return dx if need_x else None, dweight if need_weight else None, None


class _LayerNormRows(torch.autograd.Function):
    """On a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, stats = library.operator("layer_norm_rows")(x, weight, bias, eps, library.stream(x.device))
        ctx.save_for_backward(x, weight, stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, stats = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx, dweight, dbias = library.operator("layer_norm_rows_backward")(
            grad, x, weight, stats, need_weight or need_bias, library.stream(x.device)
        )
        return dx if need_x else None, dweight if need_weight else None, dbias if need_bias else None, None


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, computed in fp32 (Ba et al. 2016,
    arXiv:1607.06450).

    Args:
        x: (..., *shape). weight, bias: of this shape, or None for 1 and 0.

    Raises:
        RuntimeError: the last dimensions of x are not of this shape.
    """
    if weight is not None and bias is not None and _fits(x, weight) and library.plain_cuda(x, weight, bias):
        if torch.is_grad_enabled():
            return _LayerNormRows.apply(x, weight, bias, eps)
        return library.operator("layer_norm_rows")(x, weight, bias, eps, library.stream(x.device))[0]
    return F.layer_norm(x, shape, weight, bias, eps)


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether a norm over the last dimension is one over rows that a GPU's registers hold."""
    return x.shape[-1:] == weight.shape and 0 < x.shape[-1] <= _LONGEST


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
    if library.plain_cuda(x, weight) and 0 < x.shape[-1] <= _LONGEST:
        if torch.is_grad_enabled():
            return _RMSNormRows.apply(x, weight, eps)
        return library.operator("rms_norm_rows")(x, weight, eps, library.stream(x.device))[0]
    # Rounded once, from fp32, as of a copy in fp32, which backward would keep.
    return F.rms_norm(x, weight.shape, eps=eps) * weight
