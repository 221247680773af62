"""Residual connections with the norms beside them: in one pass over memory, where nobody looks at what is between.

A block with norms before its parts goes on with the sum and the norm of it (`pre_norm`), one with norms behind its
parts with the norm alone (`post_norm`). In backward, two gradients that come back to one tensor are added on the way.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.ops import Added, is_just, norm_after, norm_before
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.norm import LayerNorm, RMSNorm, UnitOffsetRMSNorm
from modelcenter.layers.packing import Packed

_FEW = 1 << 14  # numbers, over which a pass takes less time than to prepare one in Python


class Branch(NamedTuple):
    """What a part of a block adds to the hidden states: dropout(x). x: (T, hidden_size), of the tokens of ctx."""

    drop: Dropout
    x: Tensor
    ctx: Packed


def pre_norm(norm: nn.Module, x: Tensor, branch: Branch | None = None) -> tuple[Tensor, Tensor]:
    """(x and the branch, to be used in place of x from here on; the norm of that)."""
    rule = _rule(norm, x, branch)
    if rule is not None:
        return norm_before(x, *rule)
    x = _sum(x, branch)
    return x, norm(x)


def post_norm(norm: nn.Module, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
    """The norm of x and the branch, twice: for the next part of the block, and for what that adds to."""
    rule = _rule(norm, x, branch)
    if rule is not None:
        return norm_after(x, *rule)
    out = norm(_sum(x, branch))
    return out, out


def _sum(x: Tensor, branch: Branch | None) -> Tensor:
    return x if branch is None else branch.drop(branch.x, branch.ctx, x)


def _rule(
    norm: nn.Module, x: Tensor, branch: Branch | None
) -> tuple[Tensor, Tensor | None, float, Added | None] | None:
    """What the operators take; None where the modules are to be called: they have hooks or a way of their own, or a
    token is generated, for which nothing is gained."""
    if not torch.is_grad_enabled() and x.numel() < _FEW:
        return None
    if not (is_just(norm, LayerNorm) or is_just(norm, RMSNorm) or is_just(norm, UnitOffsetRMSNorm)):
        return None
    if branch is not None and not is_just(branch.drop, Dropout):
        return None
    rule = norm.rule(x)
    if rule is None:
        return None
    return *rule, None if branch is None else branch.drop.added(branch.x, branch.ctx)
