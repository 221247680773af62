"""What all ways to attend are told of a layer."""

from typing import NamedTuple

from modelcenter.layers.dropout import NO_DROPOUT, AttentionDropout
from modelcenter.layers.mask import NO_MASK, Mask


class AttentionOptions(NamedTuple):
    """How a layer attends: its heads, the scale of the scores, what each query sees, and which weights are dropped."""

    heads: int
    kv_heads: int
    scale: float
    mask: Mask = NO_MASK
    drop: AttentionDropout = NO_DROPOUT
