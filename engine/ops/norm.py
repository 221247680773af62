"""Norms of rows, fused with the residual addition of a Transformer block.

For an RMS norm on a CPU, torch passes over the memory of a row six times, and more often in backward. The compiled
operators (csrc/cpu/norm.h, csrc/cuda/norm.cu) read a row once for the result, and once for all gradients. They also
fuse the neighbours of a norm: in forward, `norm_before` and `norm_after` add a branch after dropout; in backward, they
sum the two gradients of the same tensor.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library, remade
from engine.ops.autograd import Function, once_differentiable
from engine.ops.compilation import host_number
from engine.ops.dropout_masks import check_tokens, drawn_key, dropout_add, numbers_of, threshold_of

_LONGEST = 8192  # elements of the longest row that csrc/cuda/norm.cu holds in registers


class Added(NamedTuple):
    """A branch that is added to a tensor after dropout.

    Attributes:
        branch: like the tensor; None: nothing is added. p, key, site, tokens: see `engine.ops.dropout`.
    """

    branch: Tensor | None
    p: float = 0.0
    key: int | Tensor | None = None
    site: int | Tensor = 0
    tokens: Tensor | None = None


_NOTHING = Added(None)
_NOTHING_DROPPED = (None, 0, 0, 0)  # tokens, key, site, threshold


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, branch: Tensor | None, draw: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(the sum, its norm, the row statistics that backward needs)."""
    call = torch.ops.modelcenter_graph.norm_part if isinstance(draw[1], Tensor) else run
    total, out, stats = call(x, weight, bias, eps, branch, *draw)
    return x if branch is None else total, out, stats


def run(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `_run`, but without a branch the sum has no elements."""
    found: tuple[Tensor, Tensor, Tensor] = library.operator("norm")(x, *arguments, library.stream(x.device))
    return found


def run_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x, branch, weight and bias."""
    found: tuple[Tensor | None, ...] = library.operator("norm_backward")(grad, *arguments, library.stream(grad.device))
    return found


class Norm(Function):
    """form: the outputs. "norm": the norm; "before": the sum and its norm; "after": the norm twice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        branch: Tensor | None,
        eps: float,
        draw: tuple[Any, ...],
        form: str,
        remakes: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        total, out, stats = _run(x, weight, bias, eps, branch, draw)
        ctx.save_for_backward(total, weight, stats, draw[0])
        if remakes:
            remade.attach(out, functools.partial(_of_sum, eps), total, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.centered, ctx.numbers, ctx.form = bias is not None, draw[1:], form
        if form == "norm":
            return out
        return (total, out) if form == "before" else (out, out.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, stats, tokens = ctx.saved_tensors
        grad, extra = (*grads, None) if ctx.form == "norm" else grads if ctx.form == "after" else grads[::-1]
        if grad is None:  # the main output was not used
            if extra is None:
                return (None,) * 8
            grad, extra = (extra, None) if ctx.form == "after" else (torch.zeros_like(extra), extra)
        need_x, need_weight, need_bias, need_branch = ctx.needs_input_grad[:4]
        call = torch.ops.modelcenter_graph.norm_backward_part if isinstance(ctx.numbers[0], Tensor) else run_backward
        dx, dbranch, dweight, dbias = call(
            grad, extra, ctx.form == "before", total, weight, stats, ctx.centered, need_weight or need_bias, tokens,
            *ctx.numbers,
        )  # fmt: skip
        return (
            dx if need_x else None,
            dweight if need_weight else None,
            dbias if need_bias else None,
            (dbranch if ctx.numbers[-1] else dx) if need_branch else None,
            *(None,) * 4,
        )


def _of_sum(eps: float, total: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _run(total, weight, bias, eps, None, _NOTHING_DROPPED)[1]


def _on_a_gpu(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether the compiled GPU operators take these. The last dimension of x is that of the weight."""
    return 0 < x.shape[-1] <= _LONGEST and library.plain_cuda(x, weight, *others)


def _is_compiled(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether the compiled operators take these, on a CPU or a GPU."""
    return library.takes_fp32(x, weight, *others) or _on_a_gpu(x, weight, *others)


def _goes_into_a_graph(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether the compiled operators take these inside torch.compile."""
    if x.device.type not in library.in_use:
        return False
    if x.is_cpu:
        return library.plain_fp32(x, weight, *others)
    return x.shape[-1] <= _LONGEST and library.same_rows(x, weight, *others)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if torch.is_grad_enabled():
        found: Tensor = Norm.apply(x, weight, bias, None, eps, _NOTHING_DROPPED, "norm", remade.is_on(x))
        return found
    return _of_sum(eps, x, weight, bias)


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, computed in fp32 (Ba et al. 2016,
    arXiv:1607.06450).

    Args:
        x: (..., *shape). weight, bias: (*shape), or None for 1 and 0.

    Raises:
        RuntimeError: the last dimensions of x are not `shape`.
    """
    if weight is not None and bias is not None and x.shape[-1:] == weight.shape == bias.shape:
        if _on_a_gpu(x, weight, bias):  # on a CPU torch is as fast
            return _norm(x, weight, bias, eps)
    out = F.layer_norm(x, shape, weight, bias, eps)
    return remade.note(out, lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps), x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 (Zhang and Sennrich 2019,
    arXiv:1910.07467). The normalised x is rounded to the dtype of x before it is multiplied by the weight, as in
    transformers' T5LayerNorm and LlamaRMSNorm.

    Args:
        x: (..., n). weight: (n,).

    Raises:
        ValueError: the rows of x are not as long as the weight.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, expected the shape of a row of x, {tuple(x.shape[-1:])}"
        )
    if _is_compiled(x, weight):
        return _norm(x, weight, None, eps)
    # F.rms_norm rounds once, from fp32, as if on an fp32 copy, but backward need not keep such a copy.
    normal = F.rms_norm(x, weight.shape, eps=eps)
    return remade.note(normal * weight, torch.mul, normal, weight)


def norm_before(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, added: Added | None = None
) -> tuple[Tensor, Tensor]:
    """Add a branch to x and normalise the sum: both outputs are used by a block with norms before its sublayers.

    Args:
        x: (..., n). weight, bias: (n,); without a bias the norm is `rms_norm`, with one `layer_norm`.

    Returns:
        (the sum, its norm). Without a branch the sum is x; use it in place of x.

    Raises:
        ValueError: p is not a probability, tokens does not fit x, or the rows of x are not as long as the weight.
    """
    return _add_and_norm(x, weight, bias, eps, added, "before")


def norm_after(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, added: Added | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of x plus a branch, twice: in a block with norms after its sublayers, the first is the input of the next
    sublayer, and the second is added to the sublayer's output. See `norm_before`."""
    return _add_and_norm(x, weight, bias, eps, added, "after")


def _add_and_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, added: Added | None, form: str
) -> tuple[Tensor, Tensor]:
    added = added or _NOTHING
    draw = _draw(x, weight, bias, added)
    if draw is not None:
        if torch.compiler.is_compiling():
            draw = draw[0], host_number(draw[1]), host_number(draw[2]), draw[3]
            return torch.ops.modelcenter_graph.add_and_norm(x, weight, bias, eps, added.branch, *draw, form)
        if torch.is_grad_enabled():
            remakes = remade.is_on(x)
            found: tuple[Tensor, Tensor] = Norm.apply(x, weight, bias, added.branch, eps, draw, form, remakes)
            return found
        total, out, _ = _run(x, weight, bias, eps, added.branch, draw)
        return (total, out) if form == "before" else (out, out)
    total, (branch, p, key, site, tokens) = x, added
    if branch is not None:
        total = dropout_add(branch, x, p, key=key, site=site, tokens=tokens)
    out = rms_norm(total, weight, eps) if bias is None else layer_norm(total, weight.shape, weight, bias, eps)
    return (total, out) if form == "before" else (out, out)


def _draw(x: Tensor, weight: Tensor, bias: Tensor | None, added: Added) -> tuple[Any, ...] | None:
    """(tokens, key, site, threshold) for the operator; None if it does not take these tensors, or if no key is given on
    a GPU: a key drawn on the host would be a constant of a CUDA graph, so dropout is torch's."""
    branch, p, key, site, tokens = added
    if x.shape[-1:] != weight.shape or not (branch is None or branch.shape == x.shape):
        return None
    threshold = 0
    if p != 0.0:
        threshold = threshold_of(p)
        if threshold == 1 << 16 or (key is None and not x.is_cpu):
            return None
    if not (_goes_into_a_graph if torch.compiler.is_compiling() else _is_compiled)(x, weight, bias, branch):
        return None
    if p == 0.0:
        return _NOTHING_DROPPED
    check_tokens(x, tokens)
    return numbers_of(x, tokens), drawn_key() if key is None else key, site, threshold
