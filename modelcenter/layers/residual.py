"""Residual connections fused with the adjacent norm, in one pass over memory if no hook reads the intermediate sum.

Pre-norm blocks continue with the sum and its norm (`pre_norm`), post-norm blocks with the norm only (`post_norm`).
Where two gradients reach the same tensor in backward, the same pass adds them.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.ops import Added, is_just, norm_after, norm_before
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.norm import LayerNorm, RMSNorm, UnitOffsetRMSNorm
from modelcenter.layers.packing import Packed

_FEW = 1 << 14  # elements for which a pass takes less time than preparing the operator in Python


class Branch(NamedTuple):
    """What a sublayer adds to the hidden states: dropout(x). x: (T, hidden_size), for the tokens of ctx."""

    drop: Dropout
    x: Tensor
    ctx: Packed


def pre_norm(norm: nn.Module, x: Tensor, branch: Branch | None = None) -> tuple[Tensor, Tensor]:
    """Returns x plus the branch, which replaces x from here on, and the norm of the sum."""
    rule = _rule(norm, x, branch)
    if rule is not None:
        return norm_before(x, *rule)
    x = _sum(x, branch)
    return x, norm(x)


def post_norm(norm: nn.Module, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
    """Returns the norm of x plus the branch twice: as the input of the next sublayer, and as the residual."""
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
    """The arguments of the operators; None if the modules must be called, because they have hooks or a forward of their
    own, or because a token is generated and nothing is gained."""
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
