"""Activations of feed-forward networks.

On a CPU, torch's GELU, exact or with tanh, is bound by computation rather than by memory, and multiplying the
activation by `up` is another pass, in forward and in backward. The compiled operators (csrc/cpu/activation.h) need one
exponential and one division per element, and a single pass.

On a GPU the compiled operators (csrc/cuda/activation.cu) are bound by memory, and save torch's passes over intermediate
tensors: the product with `up` is part of the same pass (`gated`), and the activation's backward also yields the
gradient of the bias of the layer before it (`engine.ops.linear_activated`).
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

# The numbers of the activations in csrc/core/activation.h.
_GELU, _GELU_TANH, _SILU, RELU = range(4)

# Elements of a tensor on a GPU below which the compiled operator saves less time than the Python around it takes. With
# a gate torch runs twice as many operators.
_PAYING, _PAYING_GATED = 1 << 24, 1 << 22
_PAYING_ON_A_CPU = 1 << 15  # elements below which torch is as fast, except for gelu_tanh without a gate


def run(x: Tensor, up: Tensor | None, kind: int) -> Tensor:
    """The activation of x (..., n), times `up` (same shape) if given, by the compiled operator."""
    found: Tensor = library.operator("activation")(x, up, kind, library.stream(x.device))
    return found


def run_backward(
    grad: Tensor, x: Tensor, up: Tensor | None, kind: int, sums: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and up and, with `sums` on a GPU, that of x summed over its rows, (n,); empty if absent."""
    call = library.operator("activation_backward")
    found: tuple[Tensor, Tensor, Tensor] = call(grad, x, up, kind, sums, library.stream(x.device))
    return found


class Activated(Function):
    """in_graph: forward and backward are operators in a graph of torch.compile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor | None, kind: int, in_graph: bool = False) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.kind, ctx.in_graph = kind, in_graph
        call = torch.ops.modelcenter_graph.activation_part if in_graph else run
        found: Tensor = call(x, up, kind)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, up = ctx.saved_tensors
        call = torch.ops.modelcenter_graph.activation_backward_part if ctx.in_graph else run_backward
        dx, dup, _ = call(grad, x, up, ctx.kind)
        need_x, need_up = ctx.needs_input_grad[:2]
        return dx if need_x else None, dup if need_up else None, None, None


class _Times(Function):
    """a * b, elementwise, for factors that backward may recompute."""

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


def _pays(numbers: int, on_a_cpu: int, x: Tensor, *others: Tensor) -> bool:
    """Whether the compiled operators take these tensors and are faster than torch's.

    numbers, on_a_cpu: the number of elements from which an autograd function in Python pays, on a GPU and on a CPU.
    Inside torch.compile the number of elements may be symbolic, and on a GPU the compiler fuses activations itself.
    """
    if x.dim() == 0:
        return False
    if torch.compiler.is_compiling():
        here = x.is_cpu and not on_a_cpu and library.loaded_isa not in ("", "plain")
        return here and library.plain_fp32(x, *others)
    if library.takes_fp32(x, *others):
        return x.numel() >= on_a_cpu and library.cpu().isa != "plain"
    return x.numel() >= numbers and library.plain_cuda(x, *others)


def _activate(x: Tensor, up: Tensor | None, kind: int) -> Tensor:
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.modelcenter_graph.activation(x, up, kind)
        return found
    return Activated.apply(x, up, kind) if torch.is_grad_enabled() else run(x, up, kind)


def gelu(x: Tensor) -> Tensor:
    """x times the standard normal cumulative distribution function of x, elementwise (Hendrycks and Gimpel 2016)."""
    return remade.note(_activate(x, None, _GELU) if _pays(_PAYING, _PAYING_ON_A_CPU, x) else F.gelu(x), gelu, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), elementwise (Hendrycks and Gimpel 2016)."""
    out = _activate(x, None, _GELU_TANH) if _pays(_PAYING, 0, x) else F.gelu(x, approximate="tanh")
    return remade.note(out, gelu_tanh, x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x), elementwise (Hendrycks and Gimpel 2016)."""
    return remade.note(_activate(x, None, _SILU) if _pays(_PAYING, _PAYING_ON_A_CPU, x) else F.silu(x), silu, x)


_KINDS: dict[Activation, int] = {gelu: _GELU, gelu_tanh: _GELU_TANH, silu: _SILU, F.relu: RELU}


def kind_of(activation: Activation) -> int | None:
    """The number of an activation in the compiled operators; None: they do not have it."""
    return _KINDS.get(activation)


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up, elementwise.

    On a GPU the compiled operators round once, whereas torch rounds the activation before it multiplies. They keep gate
    and up for backward; torch also keeps activation(gate), so they save a third of the memory, except with relu.

    Args:
        activation: any function; `gelu`, `gelu_tanh`, `silu` and torch's relu can be fused.
        gate, up: (..., n).
    """
    pays = gate.shape == up.shape and _pays(_PAYING_GATED, _PAYING_ON_A_CPU, gate, up)
    if not pays or (kind := kind_of(activation)) is None:
        activated = activation(gate)
        plain = gate.shape == up.shape and gate.dtype == up.dtype and remade.is_on(up)
        out: Tensor = _Times.apply(activated, up) if plain else activated * up
        return remade.note(out, torch.mul, activated, up)
    return remade.note(_activate(gate, up, kind), functools.partial(run, kind=kind), gate, up)
