"""The fused operators written in torch, one IEEE operation at a time in the order of csrc/core/formulas.h, so that they
give the same bits.

For tests, and for devices that the compiled operators do not serve. They read `found_inf` and the steps, so they wait
for a GPU. They keep denormals, which the compiled operators flush to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops.rounding_bits import places_of, random_bits

BLOCK = 128  # elements of an 8-bit moment that share a scale
_TOP = 1.875
_FIRST, _SECOND = (127 - 15) << 3, (127 - 31) << 3


class Mode(IntEnum):
    """How a parameter is kept, see `engine.ops.fused`; the numbers are those of the kernels."""

    PLAIN = 0
    MASTER = 1
    REMAINDER = 2
    RANDOM = 3


class StepArguments(NamedTuple):
    """The arguments that all optimizer steps share, see `engine.ops.fused`. v: None for optimizers with one moment.
    mode: a number of `Mode`. scales: for 8-bit moments, (m_scale, v_scale, widths)."""

    p: Sequence[Tensor]
    g: Sequence[Tensor]
    m: Sequence[Tensor]
    v: Sequence[Tensor] | None
    aux: Sequence[Tensor]
    step: Sequence[Tensor]
    gscale: Tensor | None
    found_inf: Tensor | None
    mode: int
    places: Sequence[int]
    scales: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[int]] | None = None


Update = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def power(x: float, n: int) -> float:
    """x^n by repeated squaring, as in the kernels."""
    result = 1.0
    while n > 0:
        if n & 1:
            result *= x
        x *= x
        n >>= 1
    return result


def adamw(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Update:
    """The update of AdamW: (step, g, w, m, v) -> the new w; m and v are updated in place."""

    def update(step: int, g: Tensor, w: Tensor, m: Tensor, v: Tensor | None) -> Tensor:
        assert v is not None
        rest1, rest2 = 1.0 - power(beta1, step), 1.0 - power(beta2, step)
        m.mul_(beta1).add_(g * (1.0 - beta1))
        v.mul_(beta2).add_(g * (1.0 - beta2) * g)
        root = v.double().sqrt().float()  # torch's fp32 sqrt is MKL's, which is not always correctly rounded
        below = root.mul_(1.0 / math.sqrt(rest2)).add_(eps)
        return (w * (1.0 - lr * weight_decay)).sub_((m * (lr / rest1)).div_(below))

    return update


def lion(lr: float, beta1: float, beta2: float, weight_decay: float) -> Update:
    """The update of Lion."""

    def update(step: int, g: Tensor, w: Tensor, m: Tensor, v: Tensor | None) -> Tensor:
        c = (m * beta1).add_(g * (1.0 - beta1))
        sign = torch.where(c.isnan(), c, c.sign())
        m.mul_(beta2).add_(g * (1.0 - beta2))
        return (w * (1.0 - lr * weight_decay)).sub_(sign.mul_(lr))

    return update


def sgdm(lr: float, momentum: float, weight_decay: float, nesterov: bool) -> Update:
    """The update of SGD with momentum."""

    def update(step: int, g: Tensor, w: Tensor, m: Tensor, v: Tensor | None) -> Tensor:
        g = g + w * weight_decay
        m.mul_(momentum).add_(g)
        return w - (g + m * momentum if nesterov else m) * lr

    return update


@torch.no_grad()
def step(update: Update, a: StepArguments) -> None:
    """The step of an optimizer with this ``update``."""
    if a.found_inf is not None and a.found_inf.item() != 0:
        return
    for i, target in enumerate(a.p):
        a.step[i].add_(1.0)
        if not target.numel():
            continue
        gradient = a.g[i].float()
        if a.gscale is not None:
            gradient = gradient * a.gscale
        first, second = _moments(a, i)
        after = update(int(a.step[i].item()), gradient, _master(a, i), first, second)
        _keep_moments(a, i, first, second)
        _keep_parameter(a, i, after)


def _master(a: StepArguments, i: int) -> Tensor:
    """The parameter in fp32."""
    if a.mode == Mode.MASTER:
        return a.aux[i]
    return merged(a.p[i], a.aux[i]) if a.mode == Mode.REMAINDER else a.p[i].float()


def _keep_parameter(a: StepArguments, i: int, after: Tensor) -> None:
    target = a.p[i]
    if a.mode == Mode.REMAINDER:
        split_into(after, target, a.aux[i])
    elif a.mode == Mode.RANDOM:
        target.copy_(at_random(after.reshape(-1), _random_bits(a, i)).view(target.shape))
    else:
        if a.mode == Mode.MASTER:
            a.aux[i].copy_(after)
        target.copy_(after)


def _moments(a: StepArguments, i: int) -> tuple[Tensor, Tensor | None]:
    """The moments in fp32; no copies if they are fp32 already."""
    if a.scales is None:
        return a.m[i].float(), a.v[i].float() if a.v else None
    assert a.v is not None
    firsts, seconds, widths = a.scales
    return from_codes(a.m[i], firsts[i], widths[i], _FIRST), from_codes(a.v[i], seconds[i], widths[i], _SECOND)


def _keep_moments(a: StepArguments, i: int, first: Tensor, second: Tensor | None) -> None:
    if a.scales is None:
        a.m[i].copy_(first)
        if a.v is not None and second is not None:
            a.v[i].copy_(second)
        return
    assert a.v is not None and second is not None
    firsts, seconds, widths = a.scales
    into_codes(first, a.m[i], firsts[i], widths[i], None)
    into_codes(second, a.v[i], seconds[i], widths[i], _random_bits(a, i))


def _random_bits(a: StepArguments, i: int) -> Tensor:
    """32 random bits for each element of the parameter, by its place and the step."""
    key, *place = a.places[4 * i : 4 * i + 4]
    return random_bits(places_of(a.p[i].numel(), *place, device=a.p[i].device), key, a.step[i])


def at_random(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 `values` to bf16: away from zero if adding 16 of the random `bits` to their lower 16 bits carries."""
    rounded = (values.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)) & -65536
    return torch.where(values.isfinite(), rounded.view(torch.float32), values).to(torch.bfloat16)


def _blocks(x: Tensor, width: int) -> Tensor:
    """The rows of x cut into (blocks, 128), each row padded with zeros."""
    return torch.nn.functional.pad(x.reshape(-1, width), (0, -width % BLOCK)).view(-1, BLOCK)


def _unblocked(x: Tensor, like: Tensor, width: int) -> Tensor:
    return x.view(like.numel() // width, -1)[:, :width].reshape(like.shape)


def from_codes(codes: Tensor, scale: Tensor, width: int, base: int) -> Tensor:
    """The inverse of `into_codes`."""
    if not codes.numel():
        return codes.float()
    c = _blocks(codes.to(torch.int32), width)
    magnitude = c & 127 if base == _FIRST else c
    value = torch.where(magnitude > 0, (magnitude + base) << 20, 0).view(torch.float32) * scale.view(-1, 1)
    if base == _FIRST:
        value = torch.where(c > 127, -value, value)
    return _unblocked(value, codes, width)


def into_codes(x: Tensor, codes: Tensor, scale: Tensor, width: int, random: Tensor | None) -> None:
    """Write fp32 numbers as bytes with a scale per block: first moments, or second ones if `random` bits are given."""
    blocks = _blocks(x, width)
    largest = (blocks.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True).view(torch.float32)
    fresh = largest / _TOP
    all_bits = (blocks / torch.where(fresh == 0, 1.0, fresh)).view(torch.int32)
    if random is None:
        bits = all_bits & 0x7FFFFFFF
        rounded = (bits + 0x7FFFF + (bits >> 20 & 1)) >> 20
        code = (rounded - _FIRST).clamp(0, 127) | (all_bits >> 24 & 128)
    else:
        rounded = (all_bits.long() + (_blocks(random, width) & 0xFFFFF)) >> 20
        code = torch.where(blocks == 0, 0, (rounded - _SECOND).clamp(1, 255))
    scale.copy_(fresh.view(scale.shape))
    codes.copy_(_unblocked(code.to(torch.uint8), codes, width))


def merged(p: Tensor, remainder: Tensor) -> Tensor:
    """The inverse of `split_into`."""
    high = p.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def split_into(master: Tensor, p: Tensor, remainder: Tensor) -> None:
    """Split fp32 numbers into bf16, with ties away from zero, and the missing 16 bits."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.contiguous().view(torch.int32))
    low = ((bits + 32768) & 65535) - 32768
    remainder.copy_(low)
    p.copy_(((bits - low) >> 16).to(torch.int16).view(torch.bfloat16))


def grad_norm_sq(g: Sequence[Tensor], out: Tensor) -> None:
    """The sum of all squares, summed in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=out.device)
    for gradient in g:
        total += gradient.double().square().sum()
    out.copy_(total)


def clip_coef(
    norm_sq: Tensor,
    loss_scale: Tensor | None,
    max_norm: float,
    eps: float,
    norm: Tensor,
    gscale: Tensor,
    found_inf: Tensor,
) -> None:
    """See `engine.ops.fused.clip_coef_`."""
    scale = 1.0 if loss_scale is None else loss_scale.double()
    value = norm_sq.sqrt() / scale
    ratio = max_norm / (value + eps)
    norm.copy_(value)
    gscale.copy_(torch.where(ratio < 1.0, ratio, 1.0) / scale)
    found_inf.copy_(torch.where(value.isfinite(), 0.0, 1.0))
