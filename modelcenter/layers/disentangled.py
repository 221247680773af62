"""Disentangled attention of DeBERTa (He et al. 2020, arXiv:2006.03654, section 3.1), after transformers' DebertaV2.

A score is the sum of up to three products: of query and key, of the query and the projected embedding of the distance
("c2p"), and of the key and that embedding ("p2c"). Each layer projects the embeddings of distances as it does tokens.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.by_length import ByLength
from modelcenter.layers.distances import Distances
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.linear import Linear
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed

# {additional product of a score: the projection of the distance embeddings that it uses}
KINDS = {"c2p": "k", "p2c": "q"}


class DistanceStates(NamedTuple):
    """The embeddings of the distances in a batch, which each layer projects.

    states: (rows, hidden_size). places: (2 * n - 1,) the row for a key 1 - n, ..., n - 1 positions after its query.
    """

    states: Tensor
    places: Tensor


class DistanceEmbedding(nn.Module):
    """A learned vector per distance or, with buckets, per near distance and per log-spaced range of far ones.

    Attributes:
        weight: (2 * span, hidden_size); row span + d is for a query d positions after its key.
    """

    def __init__(self, hidden_size: int, max_distance: int, num_buckets: int | None, norm_eps: float | None):
        """
        Args:
            max_distance: distances from this on share one vector.
            num_buckets: buckets for queries after their key, and again for others; half of them hold a single distance.
                None: max_distance buckets.
            norm_eps: epsilon of a LayerNorm over the vectors; None: no norm.
        """
        super().__init__()
        self.span, self.max_distance, self.num_buckets = num_buckets or max_distance, max_distance, num_buckets
        self.weight = nn.Parameter(torch.empty(2 * self.span, hidden_size).normal_(std=0.02))
        self.norm = None if norm_eps is None else LayerNorm(hidden_size, norm_eps)
        self._places: ByLength[tuple[Tensor, slice]] = ByLength()

    def places(self, distance: Tensor) -> Tensor:
        """The row of each distance, the position of a query minus that of its key; integers of any shape."""
        if self.num_buckets is not None:
            middle, sign = self.num_buckets // 2, torch.sign(distance)
            near = (distance < middle) & (distance > -middle)
            far = torch.where(near, torch.full_like(distance, middle - 1), distance.abs())
            # The same expression as in transformers: rounding decides between neighbouring buckets.
            octaves = torch.log(far / middle) / torch.log(torch.tensor((self.max_distance - 1) / middle))
            logs = torch.ceil(octaves * (middle - 1)) + middle
            distance = torch.where(far <= middle, distance.type_as(logs), logs * sign).long()
        return (distance + self.span).clamp(0, 2 * self.span - 1)

    def forward(self, longest: int, multiple: int = 1, unlike: Collection[int] = ()) -> DistanceStates:
        """The vectors for sequences of `longest` tokens, padded with zeros until their number is a multiple of
        `multiple` and not in `unlike`."""
        device = self.weight.device

        def make(n: int) -> tuple[Tensor, slice]:
            places = self.places(torch.arange(n - 1, -n, -1, device="cpu"))
            first, last = int(places[-1]), int(places[0])  # the later a key, the smaller its row
            return (places - first).to(device), slice(first, last + 1)

        places, reach = self._places.get(longest, device, make)
        states = self.weight[reach]
        if self.norm is not None:
            states = self.norm(states)
        rows = -(-states.shape[0] // multiple) * multiple
        while rows in unlike:
            rows += multiple
        return DistanceStates(F.pad(states, (0, 0, 0, rows - states.shape[0])), places)


def with_distances(ctx: Packed, embedding: DistanceEmbedding) -> None:
    """Set `ctx.distances` to the embeddings of the batch's distances, and number their rows for dropout."""
    draws, split = ctx.draws, ctx.split
    known = () if draws is None else [tokens.numel() for tokens in (draws.tokens, *draws.parts)]
    shared = 1 if split is None else split.multiple // split.size  # ranks that have a part of the rows in a unit
    # Dropout tells rows of tokens and of distances apart by their number.
    states, places = embedding(ctx.longest, shared, [count * shared for count in known])
    numbers = torch.arange(states.shape[0], device=states.device)
    if split is not None:
        states, numbers = split.to_units(states), split.of_units(numbers)
    if draws is not None:
        ctx.draws = replace(draws, parts=(*draws.parts, numbers))
    ctx.distances = DistanceStates(states, places)


def own_projection(kind: str) -> str:
    """The name of the projection that is used for distances only."""
    return f"distance_{KINDS[kind]}"


class DisentangledSelfAttention(SelfAttention):
    """Self-attention whose scores depend on the distances of the batch, `ctx.distances`. x: (T, hidden_size) -> the
    same, or (m, hidden_size) for the tokens that are read.

    Attributes:
        products: how many products are summed in a score.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float,
        *,
        scale: float,
        kinds: Collection[str],
        shared: bool,
        states_dropout: float,
    ):
        """
        Args:
            scale: factor of the scores. kinds: the additional products of a score, from KINDS. shared: distances use
                the projections of tokens; else their own. states_dropout: dropout of the embeddings of distances.
        """
        super().__init__(hidden_size, num_heads, dropout, scale=scale)
        self.kinds, self.shared = tuple(kinds), shared
        for kind in () if shared else self.kinds:
            setattr(self, self._projection(kind), Linear(hidden_size, hidden_size))
        self.products = 1 + len(self.kinds)
        self.states_dropout = Dropout(states_dropout)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        # Dropout comes first: after a split projection, each rank would draw its own random numbers.
        states, places = ctx.distances
        states = self.states_dropout(states, ctx)
        q, k, v = self.project(x, ctx)
        distances = Distances(self._by_distance("c2p", states, places), self._by_distance("p2c", states, places))
        return self.out(ctx.scaled(ctx.narrow(self.mix(q, k, v, ctx, distances))))

    def _by_distance(self, kind: str, states: Tensor, places: Tensor) -> Tensor | None:
        """(heads, 2 n - 1, head_dim), for this rank's heads: the factors of queries ("c2p") or keys ("p2c")."""
        if kind not in self.kinds:
            return None
        found = self.get_submodule(self._projection(kind))(states)
        return found.index_select(0, places).unflatten(1, (-1, self.head_dim)).transpose(0, 1)

    def _projection(self, kind: str) -> str:
        """The name of the layer that projects the embeddings of distances."""
        return KINDS[kind] if self.shared else own_projection(kind)
