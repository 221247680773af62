"""Sinusoidal positions (Vaswani et al. 2017, arXiv:1706.03762), computed for the positions of a batch: nothing is
stored, and there is none that is too far.
"""

import torch
from torch import Tensor


def sinusoids(positions: Tensor, frequencies: Tensor) -> Tensor:
    """(T,) positions and (n,) frequencies in radians per place -> (T, 2 n) fp32: sines, and after them cosines."""
    angles = positions.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
