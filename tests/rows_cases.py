"""Comparisons of operators with float64: norms of rows, sums of columns, activations and rotary positions, on a CPU, on
a GPU, and with csrc/cuda on a CPU."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import dropout, library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows for one thread, part of a warp, several warps and a block; more groups of rows than blocks; no rows.
NORMS = [(3, 1), (5, 9), (70, 64), (150, 72), (41, 256), (9, 264), (13, 1024), (5, 1608), (3, 4097), (2, 8192), (0, 40)]
SUMS = [(1, 1), (3, 7), (100, 64), (300, 257), (33, 256), (700, 40), (0, 24), (70, 1000), (5, 0), (40, 5000)]
# For one thread, part of a tile, several tiles, more numbers than a block takes; empty.
ACTIVATED = [(3, 1), (5, 9), (70, 64), (40, 264), (70, 33), (9, 520), (0, 24), (5, 0)]
# In the order of their numbers in csrc/core/activation.h.
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, F.relu)
EPS = 1e-5

Place = Callable[[Tensor, int], Tensor]


def at_odd(x: Tensor, odd: int) -> Tensor:
    """A copy of x that begins at an odd element, or at a multiple of 16 bytes."""
    room = torch.full((x.numel() + 1,), torch.nan if x.is_floating_point() else -1, dtype=x.dtype, device=x.device)
    return room[odd : x.numel() + odd].view(x.shape).copy_(x)


# (whether a norm has a bias, how many of 65,536 elements of the branch are dropped).
ADDED = tuple((centered, dropped) for centered in (True, False) for dropped in (0, 6554))


def check_norms(
    rows: int, n: int, dtype: torch.dtype, device: str, odd: int, place: Place = at_odd, added: Any = ADDED
) -> None:
    generator = torch.Generator().manual_seed(rows * n + odd)

    def drawn(*shape: int, mean: float = 0.0) -> Tensor:
        x = torch.randn(*shape, generator=generator) + mean
        return place(x.to(dtype).to(device), odd)

    x, grad = drawn(rows, n, mean=3.0), drawn(rows, n)
    weight, bias = drawn(n, mean=1.0), drawn(n)
    for centered in (True, False):
        check_norm(x, weight, bias if centered else None, grad)
    for centered, dropped in added:
        branch, extra = drawn(rows, n), drawn(rows, n)
        tokens = place((torch.arange(rows) * 7 + (1 << 33)).to(device), odd)
        draw = (tokens if rows % 2 else None, 987654321 << 20, 5, dropped)
        check_added(x, branch, weight, bias if centered else None, grad, extra, draw)


def check_norm(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> None:
    """Check a norm alone, and its gradients with and without those of the weight."""
    n, stream, nothing = x.shape[-1], library.stream(x.device), (None, 0, 0, 0)
    exact = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    norm, back = library.operator("norm"), library.operator("norm_backward")
    wanted = (
        F.rms_norm(*exact[:1], (n,), exact[1], EPS) if bias is None else F.layer_norm(exact[0], (n,), *exact[1:], EPS)
    )
    run = lambda: norm(x, weight, bias, EPS, None, *nothing, stream)  # noqa: E731
    total, out, stats = run()
    assert torch.equal(out, run()[1]) and out.shape == x.shape and not total.numel()
    close(out, wanted.detach(), 1 if bias is not None else 2)
    if bias is None:  # rounded before it is multiplied by the weight
        ours = F.rms_norm(x.float(), (n,), eps=EPS).to(x.dtype) * weight
        assert (out != ours).double().sum() <= 0.01 * out.numel() + 1 or x.dtype is torch.float32
    gradients = torch.autograd.grad(wanted, exact, grad.double())
    for sums in (True, False):
        found = [
            back(grad, None, False, x, weight, stats, bias is not None, sums, *nothing, stream) for _ in range(1 + sums)
        ]
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))
        dx, dbranch, *of_weights = found[0]
        close(dx, gradients[0])
        assert not dbranch.numel()
        if not sums:
            assert not any(t.numel() for t in of_weights)
            continue
        assert bias is not None or not of_weights.pop().numel()
        for ours, theirs in zip(of_weights, gradients[1:], strict=True):
            close(ours, theirs)


def check_added(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, extra: Tensor, draw: tuple[Any, ...]
) -> None:
    """Check the norm of x + dropout(branch): sum and masks bit for bit, the rest as for the norm alone."""
    stream, (tokens, key, site, threshold) = library.stream(x.device), draw
    norm, back, centered = library.operator("norm"), library.operator("norm_backward"), bias is not None

    def drop(t: Tensor) -> Tensor:
        return dropout(t, threshold / 65536, key=key, site=site, tokens=tokens)

    total, out, stats = norm(x, weight, bias, EPS, branch, *draw, stream)
    wanted = (x.float() + drop(branch.float())).to(x.dtype)
    assert torch.equal(total, wanted)
    _, alone, of_alone = norm(wanted, weight, bias, EPS, None, None, 0, 0, 0, stream)
    close(out, alone.double())
    close(stats, of_alone.double())
    for of_sum in (True, False):
        dx, dropped, *of_weights = back(grad, extra, of_sum, total, weight, stats, centered, True, *draw, stream)
        whole = grad.double() if of_sum else grad.double() + extra.double()
        exact = [t.double().requires_grad_() for t in (total, weight, bias) if t is not None]
        n = x.shape[-1]
        of = F.layer_norm(exact[0], (n,), *exact[1:], EPS) if centered else F.rms_norm(exact[0], (n,), exact[1], EPS)
        gradients = torch.autograd.grad(of, exact, whole)
        close(dx, gradients[0] + (extra.double() if of_sum else 0))
        for ours, theirs in zip(of_weights[: len(exact) - 1], gradients[1:], strict=True):
            close(ours, theirs)
        if threshold:
            assert torch.equal(dropped, drop(dx.float()).to(x.dtype))
        else:
            assert not dropped.numel()


def check_sums(rows: int, n: int, dtype: torch.dtype, device: str, odd: int, place: Place = at_odd) -> None:
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(rows * n)) + 0.5
    x = place(x.to(dtype).to(device), odd)
    wide = place(torch.cat([x, torch.full_like(x, torch.nan)], 1), odd)[:, :n]  # rows are not adjacent
    stream = library.stream(x.device)
    for each in (x, wide, x.t().contiguous().t(), (x[:1] / 64).expand(rows, n)):
        found = library.operator("column_sums")(each, stream)
        assert found.shape == (n,) and torch.equal(found, library.operator("column_sums")(each, stream))
        close(found, each.double().sum(0))


def check_activations(
    rows: int, n: int, dtype: torch.dtype, device: str, odd: int, place: Place = at_odd, kinds: Any = range(4),
    with_sums: tuple[bool, ...] = (True, False),
) -> None:  # fmt: skip
    """Check activations with and without gate and sums, and with gradients that are expanded or column-major."""
    generator, stream = torch.Generator().manual_seed(rows * n + odd), library.stream(torch.device(device))
    drawn = (torch.randn(rows, n, generator=generator) * scale for scale in (2.0, 1.0, 1.0))
    x, up, grad = (place(t.to(dtype).to(device), odd) for t in drawn)
    run, back = library.operator("activation"), library.operator("activation_backward")
    for kind in kinds:
        for factor in (None, up):
            exact = [t.double().requires_grad_() for t in (x, factor) if t is not None]
            wanted = ACTIVATIONS[kind](exact[0]) * (1 if factor is None else exact[1])
            found = run(x, factor, kind, stream)
            assert found.dtype == dtype
            scale = torch.ones_like(exact[0]) if factor is None else exact[1].detach().abs()
            precise(found, wanted.detach(), scale)
            for g in (grad, grad.t().contiguous().t(), grad[:1].expand(rows, n))[: 1 if factor is None or kind else 3]:
                gradients = torch.autograd.grad(wanted, exact, g.double(), retain_graph=True)
                for sums in with_sums:
                    found = [back(g, x, factor, kind, sums, stream) for _ in range(1 + sums)]
                    assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))
                    dx, dup, total = found[0]
                    precise(dx, gradients[0], scale * g.double().abs())
                    if factor is None:
                        assert not dup.numel()
                    else:
                        precise(dup, gradients[1], (exact[0].detach().abs() + 1) * g.double().abs())
                    if sums:
                        assert total.dtype == dtype
                        close(total, gradients[0].sum(0))
                    else:
                        assert not total.numel()


def check_ends_of_activations(dtype: torch.dtype, device: str) -> None:
    """Check activations of extreme numbers, infinity and NaN."""
    ends = torch.tensor([torch.nan, torch.inf, 6e4, -6e4, 300.0, -300.0, 0.0, -0.0], device=device).to(dtype)
    stream = library.stream(ends.device)
    for kind, torchs in enumerate(ACTIVATIONS):
        x = ends.double().requires_grad_()
        wanted = torchs(x)
        slopes = torch.autograd.grad(wanted.sum(), x)[0]
        found = library.operator("activation")(ends, None, kind, stream)
        assert torch.equal(found.isnan(), ends.isnan())
        close(found[2:], wanted.detach()[2:])
        assert found[1] == torch.inf
        dx = library.operator("activation_backward")(torch.ones_like(ends), ends, None, kind, False, stream)[0]
        close(dx[2:], slopes[2:])
        assert dx[0].isnan() or kind == 3  # like torch, relu treats NaN as above zero


def precise(found: Tensor, wanted: Tensor, scale: Tensor) -> None:
    """As `close`, and in fp32 within a millionth of wanted + scale."""
    close(found, wanted)
    if found.dtype is torch.float32 and found.numel():
        error = (found.double() - wanted).abs() / (1e-6 * (wanted.abs() + scale) + 1e-30)
        assert error.max().item() <= 1, error.max().item()


def close(found: Tensor, wanted: Tensor, roundings: int = 1) -> None:
    """Assert that results are as close as fp32 ones after so many roundings to the dtype of `found`."""
    assert found.shape == wanted.shape
    if not found.numel():
        return
    largest = wanted.abs().max().item()
    step = torch.finfo(found.dtype).eps if found.dtype is not torch.float32 else 0.0
    error = (found.double() - wanted).abs()
    allowed = roundings * 0.5001 * step * wanted.abs() + 4e-6 * largest + 2e-6
    assert bool((error <= allowed).all()), (error / allowed).max().item()


def check_all(place: Place = at_odd, device: str = "cpu") -> None:
    for index, (rows, n) in enumerate(NORMS):
        for number, dtype in enumerate(DTYPES):
            # Long rows are slow if csrc/cuda runs on a CPU, so the longest ones have one dtype each.
            if n > 2000 and number != index % len(DTYPES):
                continue
            added = ADDED if n < 300 else ADDED[(index + number) % 4 :][:1]
            check_norms(rows, n, dtype, device, (index + number) % 2, place, added)
    for index, (rows, n) in enumerate(SUMS):
        for number, dtype in enumerate(DTYPES):
            check_sums(rows, n, dtype, device, (index + number) % 2, place)
    for index, (rows, n) in enumerate(ACTIVATED):
        for number, dtype in enumerate(DTYPES):
            for kind in range(4):
                check_activations(rows, n, dtype, device, (index + number + kind) % 2, place, (kind,))
    for dtype in DTYPES:
        check_ends_of_activations(dtype, device)
    for shape, dtype, odd in itertools.product(ROTATIONS, DTYPES, (0, 1)):
        check_rotation(shape, dtype, device, odd, place)


# -- rotary positions --------------------------------------------------------------------------------------------------

# (tokens, query heads, key heads, head_dim, rotated pairs): all pairs of a head, the first ones, or none.
ROTATIONS = [
    (5, 4, 2, 16, 8), (37, 2, 2, 128, 64), (7, 3, 1, 24, 8), (9, 3, 1, 80, 10), (4, 2, 1, 10, 3), (3, 5, 5, 2, 1),
    (6, 1, 0, 48, 24), (6, 0, 2, 8, 2), (2, 2, 1, 8, 0), (0, 2, 1, 16, 8), (70, 6, 2, 64, 16),
]  # fmt: skip


def rotated(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool, back: bool) -> Tensor:
    """x in fp64, with pairs rotated as complex numbers."""
    dim, whole = 2 * cos.shape[-1], x.double().reshape(x.shape[0], x.shape[1] // head_dim, head_dim).clone()
    a, b = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(dim // 2), slice(dim // 2, dim))
    turned = torch.complex(whole[..., a], whole[..., b])
    turned = turned * torch.complex(cos.double(), -sin.double() if back else sin.double())
    whole[..., a], whole[..., b] = turned.real, turned.imag
    return whole.view(x.shape)


def check_rotation(shape: tuple[int, ...], dtype: torch.dtype, device: str, odd: int, place: Place = at_odd) -> None:
    tokens, heads, kv_heads, head_dim, pairs = shape
    generator = torch.Generator().manual_seed(tokens * head_dim + pairs)
    angles = 9 * torch.rand(tokens, 1, pairs, generator=generator)
    cos, sin = (place(t.to(dtype).to(device), odd) for t in (angles.cos(), angles.sin()))
    q, k = (
        place(torch.randn(tokens, count * head_dim, generator=generator).to(dtype).to(device), odd)
        for count in (heads, kv_heads)
    )
    layouts = [(q, k), (q.t().contiguous().t(), k)]
    for more in (8, 1):  # columns of one product whose rows begin at multiples of 16 bytes, or do not
        product = place(torch.cat([q, k, q.new_full((tokens, more), torch.nan)], 1), odd)
        layouts.append((product[:, : q.shape[1]], product[:, q.shape[1] : -more]))
    for (each_q, each_k), interleaved, back in itertools.product(layouts, (False, True), (False, True)):
        how = head_dim, interleaved, back
        found = library.operator("rotate")(each_q, each_k, cos, sin.flatten(1), *how, library.stream(q.device))
        for ours, x in zip(found, (q, k), strict=True):
            assert ours.is_contiguous() and ours.dtype == dtype
            close(ours, rotated(x, cos, sin, *how))
            still = [t.unflatten(1, (-1, head_dim))[..., 2 * pairs :] for t in (ours, x)]
            assert torch.equal(*still)
