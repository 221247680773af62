"""GELU by its tanh approximation, whose hyperbolic tangent costs torch more on a CPU than all the rest of an MLP's
elementwise work. The compiled operator (csrc/cpu/gelu.h) takes a third of the time, in both directions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library
from engine.ops.autograd import once_differentiable


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _run(x, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _run(x, grad.contiguous())


def _run(x: Tensor, grad: Tensor | None) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops.modelcenter.gelu_tanh_(out, x, grad)
    return out


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), elementwise (Hendrycks and Gimpel 2016)."""
    if not library.takes_fp32(x) or library.cpu().isa == "plain":
        return F.gelu(x, approximate="tanh")
    return _Gelu.apply(x) if torch.is_grad_enabled() else _run(x, None)
