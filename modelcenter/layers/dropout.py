"""Dropout of hidden states, keyed by the token where a training loop says which rows a batch holds.

That of attention weights is layers.packed_attention.Drop.
"""

import zlib

from torch import Tensor, nn

from engine.ops import Draws, dropout, dropout_add, eager
from modelcenter.layers.packing import Packed


class Dropout(nn.Module):
    """dropout(x), or residual + dropout(x). x: (..., channels) -> the same.

    Attributes:
        site: a number of the place in the model, of its name (`name_sites`), so that places draw apart.
    """

    site: int | None = None

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def forward(
        self,
        x: Tensor,
        ctx: Packed | None = None,
        residual: Tensor | None = None,
        *,
        pooled: bool = False,
        first_channel: int = 0,
    ) -> Tensor:
        """x: a row for each token of ctx, or with `pooled` for each sequence. first_channel: of a part of them."""
        if not self.training or self.p == 0.0:
            return x if residual is None else residual + x
        draws = None if ctx is None else ctx.draws
        if draws is None or self.site is None:
            return dropout(x, self.p) if residual is None else dropout_add(x, residual, self.p)
        return _keyed(x, residual, self.p, draws, self.site, pooled, first_channel)


def _draw(
    x: Tensor, residual: Tensor | None, p: float, draws: Draws, site: int, pooled: bool, first_channel: int
) -> Tensor:
    tokens = draws.sequences if pooled else draws.of(x.shape[0])
    if residual is None:
        return dropout(x, p, key=draws.key, site=site, tokens=tokens, first_channel=first_channel)
    return dropout_add(x, residual, p, key=draws.key, site=site, tokens=tokens, first_channel=first_channel)


# The key changes at each step: it must not be a constant of a compiled graph.
_keyed = eager(_draw, "modelcenter.layers.dropout.keyed")


def name_sites(model: nn.Module) -> None:
    """Give each Dropout and each attention of a model its site."""
    for name, module in model.named_modules():
        if hasattr(type(module), "site"):
            module.site = zlib.crc32(name.encode())
