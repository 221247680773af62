"""A soft cap: numbers near 0 hardly change, and none exceeds the cap (Gemma 2, arXiv:2408.00118)."""

import torch
from torch import Tensor


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap); for 16-bit x computed in fp32 and rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return ((wide / cap).tanh() * cap).to(x.dtype)
