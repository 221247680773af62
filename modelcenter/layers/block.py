"""Transformer blocks: how attention, feed-forward networks, residuals and norms are connected.

If only some tokens of a block's output are needed (`Packed.with_outputs`), the block computes only these after its
attention has mixed the values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from modelcenter.layers.attention import CrossAttention
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.residual import Branch, post_norm, pre_norm


class PostNormBlock(nn.Module):
    """norm(x + attn(x)), then norm(x + mlp(x)), as in the original Transformer. x: (T, hidden_size) -> the same.

    With `cross`, cross-attention comes between the two; it is skipped if a batch has no encoder states. attn_dropout:
    dropout of the attention's output; None: `dropout`.
    """

    def __init__(
        self,
        attn: nn.Module,
        mlp: nn.Module,
        hidden_size: int,
        norm_eps: float,
        dropout: float,
        cross: CrossAttention | None = None,
        attn_dropout: float | None = None,
    ):
        super().__init__()
        self.attn = attn
        self.attn_norm = LayerNorm(hidden_size, norm_eps)
        self.cross = cross
        if cross is not None:
            self.cross_norm = LayerNorm(hidden_size, norm_eps)
            self.cross_dropout = Dropout(dropout)
        self.mlp = mlp
        self.mlp_norm = LayerNorm(hidden_size, norm_eps)
        self.attn_dropout = Dropout(dropout if attn_dropout is None else attn_dropout)
        self.mlp_dropout = Dropout(dropout)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        cross = self.cross
        own = ctx.with_outputs(None) if cross is not None and cross.sees(ctx) else ctx
        x, again = post_norm(self.attn_norm, own.narrow(x), Branch(self.attn_dropout, self.attn(x, own), own))
        if cross is not None and cross.sees(ctx):
            branch = Branch(self.cross_dropout, cross(x, ctx), ctx)
            x, again = post_norm(self.cross_norm, ctx.narrow(again), branch)
        elif cross is not None and self.training:
            again = unused(again, cross, self.cross_norm)
        return ctx.widen(post_norm(self.mlp_norm, again, Branch(self.mlp_dropout, self.mlp(x, ctx), ctx))[0])


class PreNormBlock(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)), as in GPT-2 and most models since. x: (T, hidden_size) -> the same.

    `norm` makes the norms: `lambda: LayerNorm(hidden_size, eps)`. With `cross`, cross-attention comes between the two;
    it is skipped if a batch has no encoder states. `scale` multiplies what is added to x. attn_dropout: dropout of the
    attention's output; None: `dropout`.
    """

    def __init__(
        self,
        attn: nn.Module,
        mlp: nn.Module,
        norm: Callable[[], nn.Module],
        dropout: float,
        cross: CrossAttention | None = None,
        scale: float = 1.0,
        attn_dropout: float | None = None,
    ):
        super().__init__()
        self.attn_norm = norm()
        self.attn = attn
        if cross is not None:
            self.cross_norm = norm()
        self.cross = cross
        if cross is not None:
            self.cross_dropout = Dropout(dropout)
        self.mlp_norm = norm()
        self.mlp = mlp
        self.attn_dropout = Dropout(dropout if attn_dropout is None else attn_dropout)
        self.mlp_dropout = Dropout(dropout)
        self.scale = scale

    def added(self, part: str, x: Tensor) -> Tensor:
        """What is added to the hidden states when `part` ("attn", "cross" or "mlp") has returned x."""
        return x if self.scale == 1.0 else x * self.scale

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        cross = self.cross
        own = ctx.with_outputs(None) if cross is not None and cross.sees(ctx) else ctx
        x, normed = pre_norm(self.attn_norm, x)
        branch, x = Branch(self.attn_dropout, self.added("attn", self.attn(normed, own)), own), own.narrow(x)
        if cross is not None and cross.sees(ctx):
            x, normed = pre_norm(self.cross_norm, x, branch)
            branch, x = Branch(self.cross_dropout, self.added("cross", cross(normed, ctx)), ctx), ctx.narrow(x)
        elif cross is not None and self.training:
            x = unused(x, cross, self.cross_norm)
        x, normed = pre_norm(self.mlp_norm, x, branch)
        return ctx.widen(self.mlp_dropout(self.added("mlp", self.mlp(normed, ctx)), ctx, x))


class SandwichNormBlock(PreNormBlock):
    """x + norm(attn(norm(x))), then x + norm(mlp(norm(x))), as in Gemma 2 and later. x: (T, hidden_size) -> the same.

    `norm` makes all norms. `cross`: as in PreNormBlock, with norms of its own (T5Gemma).
    """

    def __init__(
        self,
        attn: nn.Module,
        mlp: nn.Module,
        norm: Callable[[], nn.Module],
        dropout: float,
        cross: CrossAttention | None = None,
    ):
        super().__init__(attn, mlp, norm, dropout, cross)
        self.attn_post_norm, self.mlp_post_norm = norm(), norm()
        if cross is not None:
            self.cross_post_norm = norm()

    def added(self, part: str, x: Tensor) -> Tensor:
        normed: Tensor = getattr(self, f"{part}_post_norm")(x)
        return normed


class BranchNormBlock(nn.Module):
    """x + norm(attn(x)), then x + norm(mlp(x)), as in OLMo 2. x: (T, hidden_size) -> the same.

    `norm` makes the norms.
    """

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module]):
        super().__init__()
        self.attn, self.mlp = attn, mlp
        self.attn_post_norm, self.mlp_post_norm = norm(), norm()

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        x = ctx.narrow(x) + self.attn_post_norm(self.attn(x, ctx))
        return ctx.widen(x + self.mlp_post_norm(self.mlp(x, ctx)))


class ParallelBlock(nn.Module):
    """x + attn(norm(x)) + mlp(norm(x)), with one norm as in GPT-J, or with `mlp_norm` two as in GPT-NeoX."""

    def __init__(
        self, attn: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module], dropout: float, mlp_norm: bool = False
    ):
        super().__init__()
        self.attn_norm = norm()
        self.attn = attn
        if mlp_norm:
            self.mlp_norm = norm()
        self.mlp = mlp
        self.attn_dropout, self.mlp_dropout = Dropout(dropout), Dropout(dropout)
        self.two_norms = mlp_norm

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        x, normed = pre_norm(self.attn_norm, x)
        x, attended = ctx.narrow(x), self.attn(normed, ctx)
        x, normed = pre_norm(self.mlp_norm, x) if self.two_norms else (x, ctx.narrow(normed))
        x = self.attn_dropout(attended, ctx, x)
        return ctx.widen(self.mlp_dropout(self.mlp(normed, ctx), ctx, x))


class _Unused(torch.autograd.Function):
    """Returns x, and gives the parameters gradients of zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(p) for p in ctx.saved_tensors)


def unused(x: Tensor, *modules: nn.Module) -> Tensor:
    """x, with gradients of zero for skipped modules: all ranks must agree on which parameters have gradients, and a
    rank with an empty batch has no encoder states to attend to."""
    return _Unused.apply(x, *(p for module in modules for p in module.parameters()))
