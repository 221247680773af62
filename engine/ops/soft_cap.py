"""A soft cap: numbers near 0 stay about as they are, and none goes beyond it (Gemma 2, arXiv:2408.00118)."""

import torch
from torch import Tensor


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), worked out in fp32 where x is of 16 bits and then rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return ((wide / cap).tanh() * cap).to(x.dtype)
