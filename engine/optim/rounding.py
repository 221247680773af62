"""Stochastic rounding of fp32 to bf16, the same on any mesh.

A value between two bf16 numbers becomes the upper one with the probability that makes the expectation exact, so that
updates far below a parameter's precision still count on average, without an fp32 copy (Gupta et al. 2015, "Deep
Learning with Limited Numerical Precision").

The random bits of an element are a hash of (parameter, step, place of the element in the whole tensor): replicas of a
parameter round alike, any mesh rounds as one process does, and a resumed run as an uninterrupted one.
"""

from __future__ import annotations

import zlib

import torch
from torch.distributed.tensor import DTensor

from engine.torch_compat import local_box, local_tensor

_CHUNK = 1 << 20  # elements hashed at a time: int64 temporaries
_MASK = 0xFFFFFFFF
_KEY = "_engine_rounding_key"


def round_at_random(parameter: torch.Tensor, name: str) -> None:
    """Let ``AdamOptimizer`` round its updates of ``parameter`` so. The name decides the random bits."""
    if parameter.dtype == torch.bfloat16:
        setattr(parameter, _KEY, zlib.crc32(name.encode()))


def rounding_key(parameter: torch.Tensor) -> int | None:
    """The number by which ``parameter`` is rounded at random; None: it is not."""
    return getattr(parameter, _KEY, None)


def stochastic_round_(target: torch.Tensor, values: torch.Tensor, key: int, step: torch.Tensor) -> None:
    """Write fp32 ``values``, this rank's shard, into the bf16 parameter ``target``. Non-finite values stay as they are.

    Args:
        key: a number of the parameter. step: 0-d, on the device of ``values``; read there, without a synchronisation.
    """
    local = local_tensor(target).view(-1)
    values = values.reshape(-1)
    whole, size, offset = target.shape, tuple(local_tensor(target).shape), (0,) * target.ndim
    if isinstance(target, DTensor):
        size, offset = local_box(whole, target.device_mesh, target.placements)
    salt = _mix(_mix(torch.tensor(key, dtype=torch.int64, device=values.device)) ^ step.to(torch.int64))
    for begin in range(0, local.numel(), _CHUNK):
        end = min(begin + _CHUNK, local.numel())
        place = _places(begin, end, size, offset, tuple(whole), values.device)
        # Both halves of the place are mixed in: a tensor may have more than 2^32 elements.
        bits = _mix(_mix((place & _MASK) ^ salt) ^ (place >> 32)) & 0xFFFF
        part = values[begin:end]
        rounded = (part.view(torch.int32) + bits.to(torch.int32)) & -65536
        local[begin:end] = torch.where(part.isfinite(), rounded.view(torch.float32), part).to(torch.bfloat16)


def _places(
    begin: int, end: int, size: tuple[int, ...], offset: tuple[int, ...], whole: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Flat places in the whole tensor of the elements ``begin``:``end`` of a box of ``size`` at ``offset`` in it."""
    inside = torch.arange(begin, end, dtype=torch.int64, device=device)
    place = torch.zeros_like(inside)
    stride = 1
    for n, o, w in zip(reversed(size), reversed(offset), reversed(whole), strict=True):
        place += (inside % n + o) * stride
        inside //= n
        stride *= w
    return place


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit numbers that mixes all bits ("lowbias32", Wellons 2018), in int64."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
