"""Norms of rows and sums of columns by csrc/cuda/rows.cu against float64: on a GPU, or where it runs on a CPU."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows of one thread, of part of a warp, of several warps and of a block; of groups of them, more than blocks; none.
NORMS = [(3, 1), (5, 9), (70, 64), (150, 72), (41, 256), (9, 264), (13, 1024), (5, 1608), (3, 4097), (2, 8192), (0, 40)]
SUMS = [(1, 1), (3, 7), (100, 64), (300, 257), (33, 256), (700, 40), (0, 24), (70, 1000), (5, 0), (40, 5000)]
EPS = 1e-5

Place = Callable[[Tensor, int], Tensor]


def at_odd(x: Tensor, odd: int) -> Tensor:
    """A copy of x that begins at an odd element, or at a multiple of 16 bytes."""
    room = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    return room[odd : x.numel() + odd].view(x.shape).copy_(x)


def check_norms(rows: int, n: int, dtype: torch.dtype, device: str, odd: int, place: Place = at_odd) -> None:
    generator = torch.Generator().manual_seed(rows * n + odd)

    def drawn(*shape: int, mean: float = 0.0) -> Tensor:
        x = torch.randn(*shape, generator=generator) + mean
        return place(x.to(dtype).to(device), odd)

    x, grad = drawn(rows, n, mean=3.0), drawn(rows, n)
    weight, bias = drawn(n, mean=1.0), drawn(n)
    stream = library.stream(x.device)
    for centered in (True, False):
        exact = [t.double().requires_grad_() for t in ((x, weight, bias) if centered else (x, weight))]
        if centered:
            wanted = F.layer_norm(exact[0], (n,), *exact[1:], EPS)
            run = lambda: library.operator("layer_norm_rows")(x, weight, bias, EPS, stream)  # noqa: E731
            back = library.operator("layer_norm_rows_backward")
        else:
            wanted = F.rms_norm(exact[0], (n,), exact[1], EPS)
            run = lambda: library.operator("rms_norm_rows")(x, weight, EPS, stream)  # noqa: E731
            back = library.operator("rms_norm_rows_backward")
        out, stats = run()
        assert torch.equal(out, run()[0]) and out.shape == x.shape
        close(out, wanted.detach(), 1 if centered else 2)
        if not centered:  # rounded before the weight multiplies it
            ours = F.rms_norm(x.float(), (n,), eps=EPS).to(dtype) * weight
            assert (out != ours).double().sum() <= 0.01 * out.numel() + 1 or dtype is torch.float32
        gradients = torch.autograd.grad(wanted, exact, grad.double())
        found = back(grad, x, weight, stats, True, stream)
        again = back(grad, x, weight, stats, True, stream)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        for ours, theirs in zip(found, gradients, strict=True):
            close(ours, theirs)
        dx, *nothing = back(grad, x, weight, stats, False, stream)
        assert torch.equal(dx, found[0]) and all(t.numel() == 0 for t in nothing)


def check_sums(rows: int, n: int, dtype: torch.dtype, device: str, odd: int, place: Place = at_odd) -> None:
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(rows * n)) + 0.5
    x = place(x.to(dtype).to(device), odd)
    wide = place(torch.cat([x, torch.full_like(x, torch.nan)], 1), odd)[:, :n]  # its rows are apart
    stream = library.stream(x.device)
    for each in (x, wide, x.t().contiguous().t(), (x[:1] / 64).expand(rows, n)):
        found = library.operator("column_sums")(each, stream)
        assert found.shape == (n,) and torch.equal(found, library.operator("column_sums")(each, stream))
        close(found, each.double().sum(0))


def close(found: Tensor, wanted: Tensor, roundings: int = 1) -> None:
    """As close as results in fp32 that are rounded so many times to the dtype of `found`."""
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
            check_norms(rows, n, dtype, device, (index + number) % 2, place)
    for index, (rows, n) in enumerate(SUMS):
        for number, dtype in enumerate(DTYPES):
            check_sums(rows, n, dtype, device, (index + number) % 2, place)
