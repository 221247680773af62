"""Dropout of hidden states and attention weights; its masks depend on the token if the training loop gives the rows of
a batch."""

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.ops import Added, Draws, attention, drawn_key, dropout, dropout_add, fresh_key, host_number
from modelcenter.layers.packing import Packed


class DrawingModule(nn.Module):
    """A module that draws dropout masks.

    Attributes:
        site: a number derived from the module's name (`name_sites`), so that no two modules draw the same masks.
        graph_site: the same as a tensor on the host, for a compiled graph that several layers share.
    """

    _site: int | None = None
    graph_site: Tensor | None = None

    @property
    def site(self) -> int | None:
        return self._site

    @site.setter
    def site(self, site: int) -> None:
        self._site, self.graph_site = site, host_number(site)


class Dropout(DrawingModule):
    """dropout(x), or residual + dropout(x). x: (..., channels) -> the same."""

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
        """x: a row per token of ctx, or with `pooled` per sequence. first_channel: the index of x's first channel, if x
        has only a part of them."""
        if not self.training or self.p == 0.0:
            return x if residual is None else residual + x
        draws = None if ctx is None else ctx.draws
        if draws is None or self.graph_site is None:  # of `site` a graph would have the value
            return dropout(x, self.p) if residual is None else dropout_add(x, residual, self.p)
        key, site = _drawn_by(draws, self)
        tokens = draws.sequences if pooled else draws.of(x.shape[0])
        if residual is None:
            return dropout(x, self.p, key=key, site=site, tokens=tokens, first_channel=first_channel)
        return dropout_add(x, residual, self.p, key=key, site=site, tokens=tokens, first_channel=first_channel)

    def added(self, x: Tensor, ctx: Packed) -> Added:
        """dropout(x) as a term to add to a residual; x: a row per token of ctx."""
        if not self.training or self.p == 0.0:
            return Added(x)
        if ctx.draws is None or self.graph_site is None:  # of `site` a graph would have the value
            return Added(x, self.p)
        return Added(x, self.p, *_drawn_by(ctx.draws, self), ctx.draws.of(x.shape[0]))


def _drawn_by(draws: Draws | None, module: DrawingModule | None) -> tuple[int | Tensor, int | Tensor]:
    """Key and site: numbers, or tensors while compiling, so that they do not become constants of the graph."""
    if torch.compiler.is_compiling():
        key = drawn_key() if draws is None or draws.graph_key is None else draws.graph_key
        return key, 0 if module is None or module.graph_site is None else module.graph_site
    return drawn_key() if draws is None else draws.key, 0 if module is None else module.site or 0


def name_sites(model: nn.Module) -> None:
    """Set the site of each module of a model that draws masks."""
    for name, module in model.named_modules():
        if isinstance(module, DrawingModule):
            module.site = zlib.crc32(name.encode())


@dataclass(frozen=True)
class AttentionDropout:
    """The dropout of attention weights in one forward of a layer.

    On a CPU the mask of a weight is a function of its query, its head and the position of its key, as that of a hidden
    state is of token and channel (engine.ops.dropout_masks); on CUDA torch draws it.

    Attributes:
        p: the probability. draws: of the batch; None: use torch's generator.
        layer: the layer that gives the site. Its number would be a constant of a compiled graph, different per layer.
        first_head: the index of the first head here, if several ranks share the heads.
        tokens: (T,) int64, the numbers of the queries; None: those of the draws, or 0, 1, 2, ... without draws.
    """

    p: float = 0.0
    draws: Draws | None = None
    layer: DrawingModule | None = None
    first_head: int = 0
    tokens: Tensor | None = None

    def of_heads(self, first: int) -> "AttentionDropout":
        """The dropout of the heads from `first` on."""
        return replace(self, first_head=self.first_head + first)

    def of_queries(self, start: int, stop: int) -> "AttentionDropout":
        """The dropout of the queries start to stop - 1, as if there were no others."""
        return self if self.draws is None else replace(self, tokens=self.draws.whole[start:stop])

    def numbers(self, total: int, places: Tensor | slice, n: int, heads: int) -> Tensor:
        """The numbers of the rows of weights (n, heads, queries, keys), whose queries are `places` among `total`.

        The lower 32 bits of a token's number are its position in its sequence; the head is added above the first 20.
        """
        tokens = self.queries
        if tokens is None:
            tokens = torch.arange(total)
        head = torch.arange(self.first_head, self.first_head + heads, device=tokens.device) << 20
        return (tokens[places].view(n, 1, -1) + head[:, None]).flatten()

    @property
    def queries(self) -> Tensor | None:
        """The numbers of the queries, if there are any."""
        return self.tokens if self.tokens is not None or self.draws is None else self.draws.whole

    @property
    def site(self) -> int:
        """The site of the layer; 0 without a layer."""
        return 0 if self.layer is None else self.layer.site or 0

    @property
    def key(self) -> int:
        """The key of the draws, or a new random one."""
        return fresh_key() if self.draws is None else self.draws.key

    def rule(self) -> attention.Dropped:
        """This dropout in the form that the compiled operator takes."""
        if not self.p:
            return attention.NOTHING_DROPPED
        return attention.Dropped(self.p, *_drawn_by(self.draws, self.layer), self.queries, self.first_head)

    def drop(self, weights: Tensor, key: int, numbers: Tensor) -> Tensor:
        """Apply dropout to weights (..., keys), whose rows have these numbers; weights that are kept are scaled up."""
        return dropout(weights, self.p, key=key, site=self.site, tokens=numbers)


NO_DROPOUT = AttentionDropout()
