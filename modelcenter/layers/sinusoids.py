"""Sinusoidal positions (Vaswani et al. 2017, arXiv:1706.03762), computed for the positions of a batch: no table is
stored, and positions are not limited.
"""

import torch
from torch import Tensor


def sinusoids(positions: Tensor, frequencies: Tensor) -> Tensor:
    """(T,) positions and (n,) frequencies in radians per position -> (T, 2 n) fp32: all sines, then all cosines."""
    angles = positions.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
