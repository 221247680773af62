"""Stochastic rounding of fp32 to bf16, the same on any mesh.

A value between two bf16 numbers is rounded up with the probability that makes the expectation exact, so that updates
far below a parameter's precision still count on average, without an fp32 copy (Gupta et al. 2015, "Deep Learning with
Limited Numerical Precision").

The random bits of an element are a hash of (parameter, step, place of the element in the whole tensor): replicas of a
parameter, all meshes, and resumed runs round alike.
"""

from __future__ import annotations

import math

import torch

from engine.notes import SHARD_PLACE
from engine.ops.reference import at_random
from engine.ops.rounding_bits import random_bits
from engine.tensors import is_shard, local_box, local_tensor

_CHUNK = 1 << 20  # elements hashed at a time: int64 temporaries


def place_of(parameter: torch.Tensor) -> tuple[int, int, int] | None:
    """(inner, stride, base) of this rank's shard in the whole, see ``engine.ops.fused``.

    None if the shard cannot be described so: more than two dimensions are cut, or two and neither is the first.
    """
    found = SHARD_PLACE.get(parameter)
    if found is None or found[0] != local_tensor(parameter).shape:
        found = (local_tensor(parameter).shape, _place(*_box(parameter), tuple(parameter.shape)))
        SHARD_PLACE.set(parameter, found)
    return found[1]


def _place(size: tuple[int, ...], offset: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, int, int] | None:
    cut = [dim for dim, (n, w) in enumerate(zip(size, whole, strict=True)) if n != w]
    if not cut or 0 in size:
        return max(1, math.prod(size)), 0, 0
    last = cut[-1]
    if len(cut) > 2 or (len(cut) == 2 and math.prod(size[: cut[0]]) > 1):
        return None
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    base = sum(o * stride for o, stride in zip(offset, strides, strict=True))
    return math.prod(size[last:]), math.prod(whole[last:]), base


def _box(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(size, offset) of this rank's shard in the whole."""
    if is_shard(parameter):
        return local_box(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(parameter.shape), (0,) * parameter.ndim


def stochastic_round_(target: torch.Tensor, values: torch.Tensor, key: int, step: torch.Tensor) -> None:
    """Write fp32 ``values``, this rank's shard, into the bf16 parameter ``target``. Non-finite values are kept.

    Args:
        key: the number of the parameter. step: 0-d, on the device of ``values``, where it is read without a
            synchronisation.
    """
    local = local_tensor(target).view(-1)
    values = values.reshape(-1)
    size, offset = _box(target)
    for begin in range(0, local.numel(), _CHUNK):
        end = min(begin + _CHUNK, local.numel())
        place = _places(begin, end, size, offset, tuple(target.shape), values.device)
        local[begin:end] = at_random(values[begin:end], random_bits(place, key, step))


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
