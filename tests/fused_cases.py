"""Calls of the fused operators: every mode and dtype, odd sizes, unaligned memory."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from engine.ops import fused, library

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (0, 1, 17, 511, 513, 1000, 40_003)  # around the kernel's block of 512 and its chunk of 16,384
KINDS = [  # mode, parameter, gradient, moments
    ("plain", F32, F32, F32), ("plain", F32, BF16, F32), ("plain", F32, F16, BF16),
    ("master", BF16, BF16, F32), ("master", F16, F16, F32), ("master", BF16, F32, BF16), ("master", F32, BF16, F32),
    ("remainder", BF16, BF16, F32), ("remainder", BF16, F32, BF16), ("remainder", BF16, BF16, BF16),
    ("random", BF16, BF16, F32), ("random", BF16, F16, BF16), ("random", BF16, BF16, BF16),
]  # fmt: skip
IDS = ["-".join(str(part).removeprefix("torch.") for part in kind) for kind in KINDS]

# Of dropout: rows, channels, first channel. The last ones consist of whole vectors, with incomplete blocks.
MASK_SHAPES = [
    (5, 768, 0), (3, 100, 0), (4, 200, 77), (1, 40_001, 0), (7, 1, 3), (2, 130, 126), (0, 8, 0), (33, 1024, 0),
    (3, 384, 640), (4, 1600, 192), (6, 16, 120), (5, 12, 4),
]  # fmt: skip
MASK_DTYPES = (F32, BF16, F16)
KEY = -123456789012345


def masked(dtype, shape):
    """x, residual, tokens and first channel of one dropout."""
    torch.manual_seed(0)
    rows, channels, first = shape
    x, residual = torch.randn(rows, channels).to(dtype), torch.randn(rows, channels).to(dtype)
    return x, residual, torch.randint(0, 2**62, (rows,)), first


def unaligned(n, dtype, fill=None):
    """n elements whose memory begins at an odd element."""
    whole = torch.full((n + 1,), float("nan") if dtype != torch.int16 else 77, dtype=torch.float32).to(dtype)
    part = whole[1:]
    return part.copy_(torch.zeros(n) if fill is None else fill)


# Numbers with special rounding, above all to 16 bits; they, too, become zeros when dropped.
SPECIAL = (float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 6e-8, -3e-5, 65504.0, 1e-40, 3.3e38)


def drop_at_odd_elements(device, dtype):
    """One dropout with all tensors aligned, and with each of x, residual and out at an odd element."""
    x, residual, tokens, first = masked(dtype, (9, 256, 128))
    tokens, found = tokens.to(device), []
    for odd in (None, 0, 1, 2):
        room = [torch.zeros(x.numel() + 1, dtype=dtype, device=device) for _ in range(3)]
        parts = [whole[int(i == odd) :][: x.numel()].view(x.shape) for i, whole in enumerate(room)]
        parts[0].copy_(x), parts[1].copy_(residual)
        stream = library.stream(tokens.device)
        torch.ops.modelcenter.dropout_(parts[2], *parts[:2], tokens, 0, first, KEY, 7, 20_000, stream)
        found.append(parts[2])
    return found


def run_on(monkeypatch, compiled, work):
    """The tensors that `work` returns with the library or with the reference."""
    for cached in (library.cpu, library.serves):
        cached.cache_clear()
    monkeypatch.setenv("MODELCENTER_FUSED", "1" if compiled else "0")
    result = work()
    assert library.cpu().loaded == compiled
    for cached in (library.cpu, library.serves):
        cached.cache_clear()
    monkeypatch.delenv("MODELCENTER_FUSED")
    return result


def on_each_isa(code, folder):
    """What `code` saves at sys.argv[1] with each instruction set and a different number of threads (sys.argv[2])."""
    root = Path(__file__).resolve().parents[1]
    found = []
    for isa, threads in (("plain", 1), ("avx2", 3), ("avx512", 2)):  # lowers the instruction set, as an older CPU would
        paths = f"{root}:{root / 'tests'}:{root / 'tests' / 'engine'}"
        environment = {**os.environ, "MODELCENTER_ISA": isa, "PYTHONPATH": paths}
        subprocess.run([sys.executable, "-c", code, folder / isa, str(threads)], check=True, env=environment)
        found.append(torch.load(folder / isa))
    return found


class Case:
    """Tensors of one call, the same for the same arguments."""

    def __init__(self, mode, p, g, m, sizes=SIZES, seed=0):
        torch.manual_seed(seed)
        self.mode = mode
        values = [torch.randn(n) for n in sizes]
        self.g = [unaligned(n, g, torch.randn(n) * 3) for n in sizes]
        self.m = [unaligned(n, m, torch.randn(n) * 0.1) for n in sizes]
        self.v = [unaligned(n, m, torch.rand(n) * 0.1) for n in sizes]
        self.step = [torch.tensor(float(i % 3 * 7)) for i in range(len(sizes))]
        self.p = [unaligned(n, p, x) for n, x in zip(sizes, values, strict=True)]
        self.aux = []
        if mode == "master":
            self.aux = [unaligned(n, F32, x) for n, x in zip(sizes, values, strict=True)]
        elif mode == "remainder":
            self.aux = [torch.zeros(n, dtype=torch.int16) for n in sizes]
            fused.split_master_(values, self.p, self.aux)
        self.places = []
        if mode == "random":  # within rows that are long, short, or cross the end of 32 bits
            self.places = [x for i, n in enumerate(sizes) for x in (i, max(1, n // 3), n, 2**32 - n // 6)]
        if mode == "remainder" or mode == "master" or p == F32:
            self.before = [x.double() for x in values]
        else:
            self.before = [x.double() for x in self.p]
        self.moments = [(x.double(), y.double()) for x, y in zip(self.m, self.v, strict=True)]

    def tensors(self):
        return [*self.p, *self.m, *self.v, *self.aux, *self.step]

    def adamw(self, **kwargs):
        settings = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3, **kwargs}
        fused.adamw_(
            self.p, self.g, self.m, self.v, self.step, self.aux, mode=self.mode, places=self.places, **settings
        )

    def values(self):
        """The parameters in float64, with all bits that are kept."""
        if self.mode == "master":
            return [x.double() for x in self.aux]
        if self.mode == "remainder":
            whole = [torch.full_like(x, float("nan"), dtype=F32) for x in self.p]
            fused.merge_master_(self.p, self.aux, whole)
            return [x.double() for x in whole]
        return [x.double() for x in self.p]
