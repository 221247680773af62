"""Operators behind one name, whatever this machine offers: the fast one where there is one, else its torch reference.

Linear on a CPU: torch multiplies fp32 matrices with MKL, which on CPUs of other makers than Intel leaves AVX-512
unused: half the speed of oneDNN, which torch ships too. There `linear` calls oneDNN. Both are exact fp32. The choice
depends on the CPU alone, never on a timing, so that a run repeats bit for bit.

Dropout (`engine.ops.masks`): torch's `bernoulli_` draws one number at a time on one thread, slower than the matrix
product beside it. Here 16 bits of a counter-based generator decide an element.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_EAGER: dict[str, Callable[..., Any]] = {}


def eager(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """`function`, left out of compiled graphs: for one that takes the key of a step or plans in Python."""
    key = name or f"{function.__module__}.{function.__qualname__}"
    _EAGER[key] = function

    def call(*args: Any, **kwargs: Any) -> Any:
        return _EAGER[key](*args, **kwargs)

    return functools.update_wrapper(call, function)


@functools.cache
def leave_to_eager() -> None:
    """Tell torch.compile about the functions marked `eager`; not at import, as it loads the compiler."""
    for key, function in _EAGER.items():
        _EAGER[key] = torch.compiler.disable(function)


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
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    if "GenuineIntel" in text or "avx512" not in text:
        return False, "MKL is at full speed on this CPU"
    return True, "MKL leaves AVX-512 unused on this CPU"


def _plain_fp32(*tensors: Tensor | None) -> bool:
    """Ordinary CPU tensors (no DTensor or other subclass), fp32, with elements."""
    return all(
        t is None
        or (
            type(t) in (Tensor, torch.nn.Parameter)
            and t.dtype == torch.float32
            and t.device.type == "cpu"
            and t.numel()
        )
        for t in tensors
    )


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (n, k).T + bias, any strides, without autograd."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def matmul_nt(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (n, k).T + bias outside autograd, for operators that write their own backward."""
    if onednn_linear()[0] and _plain_fp32(a, b, bias):
        return _onednn(a, b, bias)
    return F.linear(a, b, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            matmul_nt(grad, weight.t()) if need_x else None,
            matmul_nt(grad.t(), x.t()) if need_weight else None,
            grad.sum(0) if need_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) @ weight (out, in).T + bias (out,)."""
    if torch.compiler.is_compiling():  # the compiler has its own ways with it
        return F.linear(x, weight, bias)
    if not (onednn_linear()[0] and _plain_fp32(x, weight, bias)) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = _Linear.apply(rows, weight, bias)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


from engine.ops.masks import Draws, draws_of, dropout, dropout_add, dropout_key, dropout_rows, fresh_key  # noqa: E402

__all__ = [
    "Draws", "draws_of", "dropout", "dropout_add", "dropout_key", "dropout_rows", "eager", "fresh_key",
    "leave_to_eager", "linear", "matmul_nt", "onednn_linear",
]  # fmt: skip
