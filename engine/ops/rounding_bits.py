"""Random bits of an element: a hash of (key, step, place in the whole tensor), and so the same on any mesh."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def random_bits(place: Tensor, key: int, step: Tensor) -> Tensor:
    """32 bits for each place (int64), as int64. step: 0-d, on the device of `place`, where it is read."""
    salt = _mix(_mix(torch.tensor(key, dtype=torch.int64, device=place.device)) ^ step.to(torch.int64))
    # Mix in both halves of the place: a tensor may have more than 2^32 elements.
    return _mix(_mix((place & _MASK) ^ salt) ^ (place >> 32))


def places_of(count: int, inner: int, stride: int, base: int, *, device: torch.device) -> Tensor:
    """The places of the first `count` elements of a shard whose rows of `inner` elements lie `stride` apart."""
    i = torch.arange(count, dtype=torch.int64, device=device)
    return base + i // max(1, inner) * stride + i % max(1, inner)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers that mixes all bits ("lowbias32", Wellons 2018), in int64."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
