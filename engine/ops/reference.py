"""The fused operators in torch's own, one IEEE operation at a time in the order of csrc/core/formulas.h: the same bits.

For tests, and for tensors on devices that the compiled operators do not serve. Reads `found_inf` and the steps, so it
waits for a GPU. Denormals are kept, where the compiled operators flush them to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.ops.hashing import places_of, random_bits

Update = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def power(x: float, n: int) -> float:
    """x^n by squaring, as the kernels do it."""
    result = 1.0
    while n > 0:
        if n & 1:
            result *= x
        x *= x
        n >>= 1
    return result


def adamw(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Update:
    """The update of AdamW: (step, g, w, m, v) -> the new w; m and v in place."""

    def update(step: int, g: Tensor, w: Tensor, m: Tensor, v: Tensor | None) -> Tensor:
        assert v is not None
        rest1, rest2 = 1.0 - power(beta1, step), 1.0 - power(beta2, step)
        m.mul_(beta1).add_(g * (1.0 - beta1))
        v.mul_(beta2).add_(g * (1.0 - beta2) * g)
        root = v.double().sqrt().float()  # torch's root in fp32 is MKL's, which is not always rounded to nearest
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
def step(
    update: Update,
    p: Sequence[Tensor],
    g: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    aux: Sequence[Tensor],
    steps: Sequence[Tensor],
    gscale: Tensor | None,
    found_inf: Tensor | None,
    mode: int,
    places: Sequence[int],
) -> None:
    """What every optimizer's operator does around its update."""
    if found_inf is not None and found_inf.item() != 0:
        return
    for i, target in enumerate(p):
        steps[i].add_(1.0)
        count = int(steps[i].item())
        gradient = g[i].float()
        if gscale is not None:
            gradient = gradient * gscale
        if mode == 1:
            before = aux[i]
        elif mode == 2:
            before = merged(target, aux[i])
        else:
            before = target.float()
        first, second = m[i].float(), v[i].float() if v else None
        after = update(count, gradient, before, first, second)
        m[i].copy_(first)
        if second is not None:
            v[i].copy_(second)
        if mode == 1:
            aux[i].copy_(after)
        if mode == 2:
            split_into(after, target, aux[i])
        elif mode == 3:
            key, *place = places[4 * i : 4 * i + 4]
            where = places_of(target.numel(), *place, device=target.device)
            bits = random_bits(where, key, steps[i])
            target.copy_(at_random(after.reshape(-1), bits).view(target.shape))
        else:
            target.copy_(after)


def at_random(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 `values` to bf16: up where their lower 16 bits and the random `bits` make more than 16."""
    rounded = (values.view(torch.int32) + bits.to(torch.int32)) & -65536
    return torch.where(values.isfinite(), rounded.view(torch.float32), values).to(torch.bfloat16)


def merged(p: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 numbers that `split_into` has taken apart."""
    high = p.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def split_into(master: Tensor, p: Tensor, remainder: Tensor) -> None:
    """fp32 numbers as bf16 ones, ties away from zero, and the 16 bits that are missing."""
    bits = torch.where(master.isnan(), float("nan"), master).contiguous().view(torch.int32)
    bits = torch.where(master.isnan(), 0x7FC00000, bits)
    low = ((bits + 32768) & 65535) - 32768
    remainder.copy_(low)
    p.copy_(((bits - low) >> 16).to(torch.int16).view(torch.bfloat16))


def grad_norm_sq(g: Sequence[Tensor], out: Tensor) -> None:
    """The sum of all squares, in fp64."""
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
    """Norm, coefficient and finiteness from the sum of squares."""
    scale = 1.0 if loss_scale is None else loss_scale.double()
    value = norm_sq.sqrt() / scale
    ratio = max_norm / (value + eps)
    norm.copy_(value)
    gscale.copy_(torch.where(ratio < 1.0, ratio, 1.0) / scale)
    found_inf.copy_(torch.where(value.isfinite(), 0.0, 1.0))
