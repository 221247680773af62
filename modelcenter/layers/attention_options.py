"""What all ways to attend are told of a layer."""

from typing import NamedTuple

from modelcenter.layers.distances import Distances
from modelcenter.layers.dropout import NO_DROPOUT, AttentionDropout
from modelcenter.layers.mask import NO_MASK, Mask


class AttentionOptions(NamedTuple):
    """How a layer attends: its heads, the scale of the scores, what each query sees, which weights are dropped, what
    distances add to the scores (None: nothing), and the soft cap of the scaled scores (engine.ops.attention.Heads)."""

    heads: int
    kv_heads: int
    scale: float
    mask: Mask = NO_MASK
    drop: AttentionDropout = NO_DROPOUT
    distances: Distances | None = None
    cap: float | None = None

    def of_heads(self, first: int, heads: int, kv_heads: int) -> "AttentionOptions":
        """The same for some of the heads."""
        distances = None if self.distances is None else self.distances.of_heads(first, heads)
        own = self.mask.of_heads(first, heads), self.drop.of_heads(first), distances, self.cap
        return AttentionOptions(heads, kv_heads, self.scale, *own)
