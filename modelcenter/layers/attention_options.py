"""The settings of a layer that all implementations of attention take."""

from typing import NamedTuple

from modelcenter.layers.distances import Distances
from modelcenter.layers.dropout import NO_DROPOUT, AttentionDropout
from modelcenter.layers.mask import NO_MASK, Mask


class AttentionOptions(NamedTuple):
    """How a layer attends.

    Attributes:
        heads, kv_heads: numbers of query heads and of key and value heads. scale: factor of the scores. mask: what each
            query sees. drop: dropout of the weights. distances: what distances add to the scores; None: nothing.
        cap: soft cap of the scaled scores (engine.ops.attention.Heads); None: no cap.
    """

    heads: int
    kv_heads: int
    scale: float
    mask: Mask = NO_MASK
    drop: AttentionDropout = NO_DROPOUT
    distances: Distances | None = None
    cap: float | None = None

    def of_heads(self, first: int, heads: int, kv_heads: int) -> "AttentionOptions":
        """The options for some of the heads."""
        distances = None if self.distances is None else self.distances.of_heads(first, heads)
        own = self.mask.of_heads(first, heads), self.drop.of_heads(first), distances, self.cap
        return AttentionOptions(heads, kv_heads, self.scale, *own)
