"""Activations of feed-forward networks.

On a CPU, GELU by its tanh approximation costs torch more than all the rest of an MLP's elementwise work, for its
hyperbolic tangent. The compiled operator (csrc/cpu/gelu.h) takes a third of the time, in both directions.

On a GPU the compiled operators (csrc/cuda/activation.cu) take as long as memory does, and so the time that torch takes
for the tensors between: what multiplies an activation takes part in the same pass (`gated`), and the gradient of the
bias before it comes out of the activation's (`engine.ops.linear_activated`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library, remade
from engine.ops.autograd import Function, once_differentiable

Activation = Callable[[Tensor], Tensor]

# By these numbers of csrc/cuda/activation.h the operators of a GPU know an activation.
_GELU, _GELU_TANH, _SILU, RELU = range(4)

# Numbers of a tensor: below, what a GPU saves is less than what Python adds. With a gate torch has twice the operators.
_PAYING, _PAYING_GATED = 1 << 24, 1 << 22


class _Gelu(Function):
    """By the tanh approximation, on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu_on_cpu(x, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _gelu_on_cpu(x, grad.contiguous())


def _gelu_on_cpu(x: Tensor, grad: Tensor | None) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops.modelcenter.gelu_tanh_(out, x, grad)
    return out


def run(x: Tensor, up: Tensor | None, kind: int) -> Tensor:
    """The activation of x (..., n), times up if it is given, on a GPU. up: as x."""
    found: Tensor = library.operator("activation")(x, up, kind, library.stream(x.device))
    return found


def run_backward(
    grad: Tensor, x: Tensor, up: Tensor | None, kind: int, sums: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and up, and the sums (n,) of the first over all else; without elements what is not there."""
    call = library.operator("activation_backward")
    found: tuple[Tensor, Tensor, Tensor] = call(grad, x, up, kind, sums, library.stream(x.device))
    return found


class _Activation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return run(x, None, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return run_backward(grad, x, None, ctx.kind)[0], None


class _Times(Function):
    """a * b, elementwise, of which an activation may be made again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        remade.keep(ctx, a, b)
        return a * b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = remade.kept(ctx)
        need_a, need_b = ctx.needs_input_grad
        return grad * b if need_a else None, grad * a if need_b else None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return run(gate, up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup, _ = run_backward(grad, gate, up, ctx.kind)
        need_gate, need_up, _ = ctx.needs_input_grad
        return dgate if need_gate else None, dup if need_up else None, None


def _pays(numbers: int, x: Tensor, *others: Tensor) -> bool:
    """Whether a GPU's operators take these, and so many numbers are worth an autograd function in Python."""
    if torch.compiler.is_compiling():  # the compiler fuses activations itself, and the number may be a symbol
        return False
    return x.numel() >= numbers and x.dim() > 0 and library.plain_cuda(x, *others)


def _activate(x: Tensor, kind: int) -> Tensor:
    return _Activation.apply(x, kind) if torch.is_grad_enabled() else run(x, None, kind)


def gelu(x: Tensor) -> Tensor:
    """x times how much of a standard normal distribution is below x (Hendrycks and Gimpel 2016), elementwise."""
    return remade.note(_activate(x, _GELU) if _pays(_PAYING, x) else F.gelu(x), gelu, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), elementwise (Hendrycks and Gimpel 2016)."""
    if _pays(_PAYING, x):
        out = _activate(x, _GELU_TANH)
    elif not library.takes_fp32(x) or library.cpu().isa == "plain":
        out = F.gelu(x, approximate="tanh")
    else:
        out = _Gelu.apply(x) if torch.is_grad_enabled() else _gelu_on_cpu(x, None)
    return remade.note(out, gelu_tanh, x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x), elementwise (Hendrycks and Gimpel 2016)."""
    return remade.note(_activate(x, _SILU) if _pays(_PAYING, x) else F.silu(x), silu, x)


_KINDS: dict[Activation, int] = {gelu: _GELU, gelu_tanh: _GELU_TANH, silu: _SILU, F.relu: RELU}


def kind_of(activation: Activation) -> int | None:
    """By what number the operators of a GPU know it, if they do."""
    return _KINDS.get(activation)


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up, elementwise.

    The operators of a GPU round once, where torch rounds the activation before it multiplies. They keep gate and up for
    backward, where torch keeps activation(gate) too, unless it is relu's: a third of the memory is saved.

    Args:
        activation: `gelu`, `gelu_tanh`, `silu` and torch's relu may be part of the operator.
        gate, up: (..., n).
    """
    if not _pays(_PAYING_GATED, gate, up) or gate.shape != up.shape or (kind := kind_of(activation)) is None:
        activated = activation(gate)
        plain = gate.shape == up.shape and gate.dtype == up.dtype and remade.is_on(up)
        out: Tensor = _Times.apply(activated, up) if plain else activated * up
        return remade.note(out, torch.mul, activated, up)
    out = _Gated.apply(gate, up, kind) if torch.is_grad_enabled() else run(gate, up, kind)
    return remade.note(out, functools.partial(run, kind=kind), gate, up)
