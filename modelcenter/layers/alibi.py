"""Attention with linear biases (ALiBi; Press et al. 2021, arXiv:2108.12409), after transformers' build_alibi_tensor."""

import torch
from torch import Tensor

_LENGTH_STEP = 64  # the bias is made for a multiple of so many tokens, so that most batches find it ready


class Alibi:
    """What attention adds to a score: minus how far away the key is, times a number of the head. There is no distance
    that is too far.

    It has no parameters: the numbers fall from head to head as powers of 2 do, from 2^(-8 / heads) to 2^-8 where the
    heads are a power of 2. Of other numbers of heads, the greatest power of 2 below are as if there were no others; the
    rest have those between these, every second one that twice as many heads would have.
    """

    def __init__(self, num_heads: int):
        self.num_heads = num_heads
        self._made: tuple[object, Tensor] | None = None

    def slopes(self, device: torch.device) -> Tensor:
        """(heads,) fp32, made on the device: a copy of numbers from the host would wait for it."""
        power = 1 << (self.num_heads.bit_length() - 1)
        exponents = (torch.arange(power, device=device) + 1) * (8 / power)
        between = (2 * torch.arange(self.num_heads - power, device=device) + 1) * (4 / power)
        return torch.exp2(-torch.cat([exponents, between]))

    def __call__(self, longest: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(heads, 2 * n - 1) as layers.mask.Mask has it, n at least `longest`; rounded to `dtype`, the nearest keys
        least: transformers rounds the same numbers counted from the first key, which to a softmax are no others."""
        n = max(-(-longest // _LENGTH_STEP), 1) * _LENGTH_STEP
        held, key = self._made, (n, device, dtype)  # read once: other threads may replace it
        if held is None or held[0] != key:
            with torch.inference_mode(False):  # a later forward may be of training
                distance = torch.arange(1 - n, n, device=device).abs()
                held = self._made = key, (self.slopes(device)[:, None] * -distance).to(dtype)
        return held[1]
