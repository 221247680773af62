"""Attention with linear biases (ALiBi; Press et al. 2021, arXiv:2108.12409), after transformers' build_alibi_tensor."""

import torch
from torch import Tensor

from modelcenter.layers.by_length import ByLength


class Alibi:
    """Biases of attention scores: minus the distance of the key times the slope of the head, for any distance.

    There are no parameters. If the number of heads is a power of 2, the slopes are a geometric sequence from
    2^(-8 / heads) to 2^-8. Otherwise the first heads, as many as the next lower power of 2, have the slopes of that
    number of heads; the others have every second slope of twice that number.
    """

    def __init__(self, num_heads: int):
        self.num_heads = num_heads
        self._biases: ByLength[Tensor] = ByLength()

    def slopes(self, device: torch.device) -> Tensor:
        """(heads,) fp32, computed on the device: copying numbers from the host would synchronise."""
        power = 1 << (self.num_heads.bit_length() - 1)
        exponents = (torch.arange(power, device=device) + 1) * (8 / power)
        between = (2 * torch.arange(self.num_heads - power, device=device) + 1) * (4 / power)
        return torch.exp2(-torch.cat([exponents, between]))

    def __call__(self, longest: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(heads, 2 * n - 1), in the layout of layers.mask.Mask.bias, with n at least `longest`. Rounding to `dtype`
        affects near keys least; transformers rounds biases counted from the first key, which a softmax treats alike."""

        def make(n: int) -> Tensor:
            distance = torch.arange(1 - n, n, device=device).abs()
            return (self.slopes(device)[:, None] * -distance).to(dtype)

        return self._biases.get(longest, (device, dtype), make)
