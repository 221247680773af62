"""Relative position bias of T5 (Raffel et al. 2019, arXiv:1910.10683, section 2.1), after transformers' T5Attention."""

import math

import torch
from torch import Tensor, nn

from modelcenter.layers.by_length import ByLength


class RelativeBias(nn.Module):
    """A learned bias per head and bucket of distances; each near distance has its own bucket, far ones share buckets.

    Attributes:
        weight: (num_buckets, num_heads).
    """

    def __init__(
        self,
        num_buckets: int,
        num_heads: int,
        max_distance: int,
        bidirectional: bool,
        held: ByLength[Tensor] | None = None,
    ):
        """`max_distance`: distances from this on share one bucket. `bidirectional`: half of the buckets are for keys
        after the query; if False, such keys share the bucket of distance 0. `held`: the cache of buckets that modules
        with the same three numbers share; None: one of its own."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads).normal_(std=0.02))
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self._buckets: ByLength[Tensor] = ByLength() if held is None else held

    def buckets(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, the position of a key minus that of its query; integers of any shape."""
        num = self.weight.shape[0]
        first = torch.zeros_like(distance)
        if self.bidirectional:
            num //= 2
            first = (distance > 0).long() * num
            distance = distance.abs()
        else:
            distance = -distance.clamp(max=0)
        exact = num // 2
        # The same expression as in transformers: rounding decides between neighbouring buckets.
        far = torch.log(distance.float() / exact) / math.log(self.max_distance / exact) * (num - exact)
        far = (exact + far.clamp(min=0).long()).clamp(max=num - 1)
        return first + torch.where(distance < exact, distance, far)

    def forward(self, longest: int) -> Tensor:
        """(heads, 2 * n - 1), in the layout of layers.mask.Mask.bias, with n at least `longest`."""
        device = self.weight.device
        buckets = self._buckets.get(longest, device, lambda n: self.buckets(torch.arange(1 - n, n, device=device)))
        # Sum the gradients of each bucket in fp32.
        return self.weight.float().t().index_select(1, buckets).to(self.weight.dtype)
