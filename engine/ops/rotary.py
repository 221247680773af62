"""Rotary position embeddings of queries and keys (Su et al. 2021, arXiv:2104.09864): pairs of channels are rotated.

torch needs eight operators each for queries and keys, and as many in backward. The compiled operators
(csrc/cpu/rotary.h, csrc/cuda/rotary.cu) read and write queries and keys once, and rotate the gradients back in the same
way. On a CPU they take fp32 and give torch's bits. On a GPU they compute in fp32 and round once, whereas torch first
rounds each product to 16 bits.
"""

from typing import Any

import torch
from torch import Tensor

from engine.ops import library
from engine.ops.autograd import Function


class _Rotate(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool, back: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.how = head_dim, interleaved, not back
        return _run(q, k, cos, sin, head_dim, interleaved, back)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        # Depends on the gradients only, so higher derivatives pass through `_turn` again.
        return *_turn(dq, dk, *ctx.saved_tensors, *ctx.how), None, None, None, None, None


def _run(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = library.operator("rotate")(q, *arguments, library.stream(q.device))
    return found


def _turn(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        found: tuple[Tensor, Tensor] = _Rotate.apply(q, k, *arguments)
        return found
    return _run(q, k, *arguments)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first channels of each head of q and of k.

    Pairs are channels i and i + dim / 2 (GPT-NeoX, Llama), or with `interleaved` 2 i and 2 i + 1 (GPT-J).

    Args:
        q: (T, heads * head_dim). k: (T, kv_heads * head_dim). To rotate only one of them, give the other no heads:
            (T, 0).
        cos, sin: (T, 1, dim / 2), of the angle by which each pair of a token is rotated; dim is at most head_dim.

    Returns:
        (q, k), rotated.

    Raises:
        RuntimeError: the tensors do not fit together.
    """
    compiled = library.takes_fp32(q, k, cos, sin) or library.plain_cuda(q, k, cos, sin)
    if compiled and not (cos.requires_grad or sin.requires_grad):
        return _turn(q, k, cos, sin, head_dim, interleaved, False)
    return composed(q, cos, sin, head_dim, interleaved), composed(k, cos, sin, head_dim, interleaved)


def composed(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
    """`rotate` of one tensor, by torch's operators."""
    dim = 2 * cos.shape[2]
    heads = x.unflatten(1, (-1, head_dim))
    turning = heads[..., :dim]
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    if dim < head_dim:
        out = torch.cat((out, heads[..., dim:]), -1)
    return out.view(x.shape)
