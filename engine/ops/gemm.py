"""Products of matrices.

On a CPU torch multiplies fp32 matrices with MKL, which on CPUs by other makers than Intel is slower than oneDNN, also
part of torch. But oneDNN compiles code for each shape, a millisecond or two on one thread, and packed batches have a
new number of tokens in almost every step. And torch only passes it contiguous matrices: in backward, where factors are
transposed, torch copies them first, on one thread. The compiled operator (csrc/cpu/products.h) is as fast as oneDNN and
needs neither, except for a few rows, as in generation, where oneDNN is used; without the compiled operator oneDNN does
everything. On AMD CPUs with only AVX2, MKL is as fast as both, again except for a few rows, where it takes up to six
times as long as the compiled operator for few rows (csrc/cpu/few_rows.h).

All are exact fp32, unless torch.set_float32_matmul_precision("medium") allows factors to be rounded to bf16. CPUs with
instructions for that then multiply twice as fast (by the compiled operator, csrc/cpu/rounded.cpp, or on Intel CPUs with
AMX by torch); sums stay in fp32. The choice depends on the CPU, on what is built and on the shape, never on timing, and
no sum depends on the number of threads: a run repeats bit for bit.

On a GPU the products are torch's. For the gradient of a bias, the sum over all rows, torch takes twice as long as
reading the rows; the compiled operator (csrc/cuda/columns.cu) sums in one pass and in a fixed order. In a layer with an
activation, the backward pass of the activation returns this gradient (csrc/cuda/activation.cu).
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import activation as activations
from engine.ops import library, remade
from engine.ops.autograd import Function, once_differentiable
from engine.torch_compat import may_round_products

_CPU = torch.device("cpu")
_FEW = 32  # rows, below which oneDNN is faster than packing the other matrix, and has compiled its code already
_FEW_OF_MKL = 48  # rows, up to which the compiled operator for few rows is faster than MKL
_PAYING = 1 << 24  # elements of a result, below which torch sums the rows in less than 30 us
# MKL runs at full speed for this many columns; with a vocabulary of 50,257 at once it is a quarter slower.
_MANY, _COLUMNS = 4096, 1024


@functools.cache
def onednn_linear() -> tuple[bool, str]:
    """Whether `linear` uses oneDNN on the CPU, and why. MODELCENTER_ONEDNN=0 or 1 overrides the choice."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False, "this build of torch has no oneDNN"
    choice = os.environ.get("MODELCENTER_ONEDNN")
    if choice in ("0", "1"):
        return choice == "1", f"MODELCENTER_ONEDNN={choice}"
    if not torch.backends.mkl.is_available():
        return False, "this build of torch does not multiply with MKL"
    if _is_intel() or "avx512" not in _cpu_info():
        return False, "MKL is at full speed on this CPU"
    return True, "MKL leaves AVX-512 unused on this CPU"


def _cpu_info() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""


@functools.cache
def _is_intel() -> bool:
    return "GenuineIntel" in _cpu_info()


def compiled() -> bool:
    """Whether the compiled operator is available for an instruction set with which it is fast."""
    return library.serves(_CPU) and library.cpu().isa == "avx512"


def multiplies_in_bf16() -> bool:
    """Whether this CPU multiplies fp32 matrices in bf16 if torch's float32 matmul precision is "medium"."""
    if onednn_linear()[0] and compiled():
        return library.cpu().rounds
    return "amx_bf16" in _cpu_info()  # oneDNN rounds fp32 matrices only for these instructions


def few_compiled() -> bool:
    """Whether the compiled operator for few rows is available, on a CPU where it was measured to be faster than MKL."""
    return library.serves(_CPU) and library.cpu().isa == "avx2" and not _is_intel()


def _are_few(rows: int) -> bool:
    """Whether the compiled operator for few rows is used for so many, and not MKL."""
    return rows <= _FEW_OF_MKL and not torch.compiler.is_compiling() and few_compiled()


def as_it_lies(x: Tensor) -> Tensor:
    """x, or a copy of it if neither its rows nor its columns are contiguous."""
    return x if 1 in x.stride() else x.contiguous()


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (n, k).T + bias, any strides, without autograd."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def _compiled_nt(a: Tensor, b: Tensor, bias: Tensor | None = None, room: Tensor | None = None) -> Tensor:
    """a @ b.T + bias by the compiled operator."""
    bias = None if bias is None else bias.contiguous()
    if room is None:  # selective recomputation keeps what an operator returns, not what it writes into
        return torch.ops.modelcenter.linear(as_it_lies(a), as_it_lies(b), bias, may_round_products())
    torch.ops.modelcenter.linear_(room, as_it_lies(a), as_it_lies(b), bias, may_round_products())
    return room


def _product_nt(a: Tensor, b: Tensor, bias: Tensor | None = None, room: Tensor | None = None) -> Tensor:
    """a @ b.T + bias of plain fp32 matrices, by whatever is fastest on this CPU for so many rows."""
    if onednn_linear()[0]:
        if a.shape[0] < _FEW or torch.compiler.is_compiling() or not compiled():
            return _onednn(a, b, bias)
        return _compiled_nt(a, b, bias, room)
    if _are_few(a.shape[0]):
        return _compiled_nt(a, b, bias, room)
    return _torchs_nt(a, b, bias, room)


def _torchs_nt(a: Tensor, b: Tensor, bias: Tensor | None, room: Tensor | None) -> Tensor:
    """a @ b.T + bias by torch, for a limited number of columns at a time."""
    if b.shape[0] <= _MANY:
        return F.linear(a, b, bias)
    out = a.new_empty((a.shape[0], b.shape[0])) if room is None else room
    for first in range(0, b.shape[0], _COLUMNS):
        part = slice(first, first + _COLUMNS)
        product = torch.mm(a, b[part].t(), out=out[:, part])
        if bias is not None:  # while the product is in the caches; addmm would first copy the bias into each row
            product.add_(bias[part])
    return out


def matmul_nt(a: Tensor, b: Tensor, bias: Tensor | None = None, room: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (n, k).T + bias without autograd, for operators with their own backward.

    room: (m, n) with contiguous rows: memory that the product may use; the result may then be this tensor.
    """
    if not library.plain_fp32(a, b, bias, room) or torch.is_autocast_enabled("cpu"):
        return F.linear(a, b, bias)
    return _product_nt(a, b, bias, room)


def matmul(a: Tensor, b: Tensor, add_to: Tensor | None = None, room: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (k, n) without autograd, for operators with their own backward; a may be transposed.

    add_to: (m, n), contiguous: the product is added to it in place, and it is returned. room: (m, n), contiguous:
    memory that the product may use if there is no add_to.
    """
    return _product(a, b, add_to, room=room)[0]


def _product(
    a: Tensor, b: Tensor, add_to: Tensor | None = None, sums: bool = False, room: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(a @ b, added to `add_to` if given; the row sums of a if `sums`, else None)."""
    if onednn_linear()[0] and library.plain_fp32(a, b, add_to) and not torch.compiler.is_compiling():
        if compiled():
            out = add_to if add_to is not None else a.new_empty((a.shape[0], b.shape[1])) if room is None else room
            total = a.new_empty(a.shape[0]) if sums else None
            a, b, add = as_it_lies(a), as_it_lies(b), add_to is not None
            torch.ops.modelcenter.product_(out, a, b, total, add, may_round_products())
            return out, total
        out = _onednn(a, b.t())
    elif add_to is not None and add_to.dtype == a.dtype == b.dtype:  # under autocast they may differ
        return add_to.addmm_(a, b), a.sum(1) if sums else None  # a GPU adds in fp32 and writes no product
    elif room is not None and not torch.is_autocast_enabled(a.device.type) and room.dtype == a.dtype == b.dtype:
        out = torch.mm(a, b, out=room)
    else:
        out = torch.mm(a, b)
    return out if add_to is None else add_to.add_(out), a.sum(1) if sums else None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        remade.keep(ctx, x, weight)
        return _product_nt(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = remade.kept(ctx)
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dx = matmul(grad, weight) if need_x else None
        if not need_weight:
            return dx, None, grad.sum(0) if need_bias else None
        return dx, *_product(grad.t(), x, sums=need_bias)


def _column_sums(grad: Tensor) -> Tensor:
    total: Tensor = library.operator("column_sums")(grad, library.stream(grad.device))
    return total


class _TorchLinear(Function):
    """torch's products, which selective recomputation knows: on a GPU for the compiled gradient of the bias, and on any
    device for inputs that are recomputed instead of kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        remade.keep(ctx, x if need_weight else None, weight if need_x else None)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = remade.kept(ctx)
        rows = grad if grad.dim() == 2 else grad.reshape(grad.shape[:-1].numel(), -1)
        dbias = None if not ctx.needs_input_grad[2] else _column_sums(rows) if _sums_pay(rows) else rows.sum(0)
        return *_of_products(rows, grad.shape[:-1], x, weight), dbias


def _of_products(
    grad: Tensor, shape: torch.Size, x: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x (*shape, in) and of the weight for grad (rows, out), by torch; each needs the other factor."""
    dx = None if weight is None else torch.mm(grad, weight)
    if dx is not None and len(shape) != 1:
        dx = dx.view(*shape, -1)
    if x is not None and len(shape) != 1:
        x = x.reshape(grad.shape[0], -1)
    return dx, None if x is None else torch.mm(grad.t(), x)


class _LinearActivated(Function):
    """`_TorchLinear` and an activation, whose backward also gives the gradient of the bias. Keeps what both would keep;
    for relu its output, from which the gradient follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kind: int, remakes: bool) -> Tensor:
        need_x, need_weight, *_ = ctx.needs_input_grad
        product = F.linear(x, weight, bias)
        out = activations.run(product, None, kind)
        kept = out if kind == activations.RELU else product
        remade.keep(ctx, kept, x if need_weight else None, weight if need_x else None)
        if remakes and kept is product:
            remade.attach(out, lambda product: activations.run(product, None, kind), product)
        ctx.kind = kind
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, x, weight = remade.kept(ctx)
        shape = grad.shape[:-1]
        grad, _, dbias = activations.run_backward(grad, kept, None, ctx.kind, True)
        rows = grad if len(shape) == 1 else grad.view(shape.numel(), -1)
        return *_of_products(rows, shape, x, weight), dbias, None, None


class _Linears(Function):
    """Several linear layers of one x, on a CPU or a GPU: the products accumulate the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        layers = [(w, b) for w, b in zip(parameters[::2], parameters[1::2], strict=True) if w is not None]
        need_x, *needed = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        remade.keep(ctx, x if any(needed[::2]) else None, *(w if need_x else None for w, _ in layers))
        forward = _product_nt if onednn_linear()[0] and library.plain_fp32(x, *parameters) else F.linear
        return tuple(forward(x, w, b) for w, b in layers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = remade.kept(ctx)
        _, *needed = ctx.needs_input_grad
        dx: Tensor | None = None
        found: list[Tensor | None] = []
        for grad, weight, need_weight, need_bias in zip(grads, weights, needed[::2], needed[1::2], strict=True):
            dweight = dbias = None
            if grad is not None:
                if weight is not None:
                    dx = matmul(grad, weight, add_to=dx)
                of_rows = need_bias and _sums_pay(grad)
                if need_weight:
                    dweight, dbias = _product(grad.t(), x, sums=need_bias and not of_rows)
                if of_rows:
                    dbias = _column_sums(grad)
                elif need_bias and not need_weight:
                    dbias = grad.sum(0)
            found += [dweight, dbias]
        return dx, *found


def _sums_pay(grad: Tensor) -> bool:
    """Whether the compiled sum over rows, on a GPU, takes less time than torch's."""
    return grad.numel() >= _PAYING and library.plain_cuda(grad)


def _joins(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the compiled operators serve these tensors."""
    on_cpu = library.takes_fp32(x, *parameters) and not torch.is_autocast_enabled("cpu")
    return on_cpu or library.plain_cuda(x, *parameters)


def linears(x: Tensor, layers: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, ...]:
    """`linear` of x with the (weight, bias) of each layer; for x (rows, in) they share one backward."""
    if x.dim() == 2 and torch.is_grad_enabled():
        parameters = [t for layer in layers for t in layer]
        if _joins(x, *parameters):
            found: tuple[Tensor, ...] = _Linears.apply(x, *parameters)
            return found
    return tuple(linear(x, weight, bias) for weight, bias in layers)


def _function_pays(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the compiled gradient of the bias is worth an autograd function in Python: for few elements torch's is as
    fast on a GPU, and the step waits for the host."""
    many = x.numel() * weight.shape[0] >= _PAYING * x.shape[-1] > 0
    return many and torch.is_grad_enabled() and library.plain_cuda(x, weight, bias)


def _multiplies(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `_product_nt` is faster than torch's `linear`. With few rows only without gradients: an autograd function
    in Python takes the time that is saved."""
    if not onednn_linear()[0] and (torch.is_grad_enabled() or not _are_few(x.shape[:-1].numel())):
        return False
    return library.plain_fp32(x, weight, bias) and not torch.is_autocast_enabled("cpu")


def _is_remade(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's own function would keep a tensor that backward should recompute."""
    return remade.is_on(x) and (remade.is_noted(x) or remade.is_noted(weight))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) @ weight (out, in).T + bias (out,)."""
    if torch.compiler.is_compiling():  # the compiler knows its own ways to multiply
        return F.linear(x, weight, bias)
    if bias is not None and bias.requires_grad and _function_pays(x, weight, bias):
        return _TorchLinear.apply(x, weight, bias)
    if not _multiplies(x, weight, bias):
        if _is_remade(x, weight):
            return _TorchLinear.apply(x, weight, bias)
        return F.linear(x, weight, bias)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    # Without gradients an autograd function only costs time: in generation as much as the products themselves.
    out = _Linear.apply(rows, weight, bias) if torch.is_grad_enabled() else _product_nt(rows, weight, bias)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


def linear_activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: activations.Activation) -> Tensor:
    """activation(x (..., in) @ weight (out, in).T + bias (out,)), elementwise."""
    if bias is not None and bias.requires_grad and not torch.compiler.is_compiling():
        kind = activations.kind_of(activation)
        if kind is not None and _function_pays(x, weight, bias):
            found: Tensor = _LinearActivated.apply(x, weight, bias, kind, remade.is_on(x))
            return found
    return activation(linear(x, weight, bias))
