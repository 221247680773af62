"""Calls of AdamW with 8-bit moments: every mode, rows that are not multiples of a block, unaligned memory."""

import torch
from fused_cases import BF16, F16, F32, unaligned

from engine.ops import fused, reference

SHAPES = [(5, 300), (3, 128), (1, 1), (0, 7), (40, 257), (2, 100), (9, 1024)]
KINDS = [
    ("plain", F32, F32), ("plain", F32, BF16), ("master", BF16, BF16), ("master", F16, F16), ("remainder", BF16, F32),
    ("random", BF16, BF16),
]  # fmt: skip
IDS = ["-".join(str(part).removeprefix("torch.") for part in kind) for kind in KINDS]
SETTINGS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}


class Case:
    """Tensors of one call, the same for the same arguments."""

    def __init__(self, mode, p, g, device="cpu"):
        torch.manual_seed(0)
        self.mode, self.g_dtype, self.device = mode, g, device
        values = [torch.randn(shape).flatten() for shape in SHAPES]
        self.p = [unaligned(x.numel(), p, x) for x in values]
        self.aux = []
        if mode == "master":
            self.aux = [x.clone() for x in values]
        if mode == "remainder":
            self.aux = [torch.zeros(x.numel(), dtype=torch.int16) for x in values]
            fused.split_master_(values, self.p, self.aux)
        if mode == "random":
            values = [x.float() for x in self.p]
        self.before = [x.double() for x in values]
        self.m, self.v = ([torch.zeros(x.numel() + 1, dtype=torch.uint8)[1:] for x in values] for _ in range(2))
        self.scales = [[torch.zeros(n, -(-width // 128)) for n, width in SHAPES] for _ in range(2)]
        self.step = [torch.zeros(()) for _ in SHAPES]
        self.widths = [width for _, width in SHAPES]
        self.places = [x for i, (n, width) in enumerate(SHAPES) for x in (i, max(1, n * width), 0, 5)]
        for name in ("p", "aux", "m", "v", "step"):
            setattr(self, name, [x.to(device) for x in getattr(self, name)])
        self.scales = [[x.to(device) for x in scale] for scale in self.scales]

    def gradients(self, seed):
        generator = torch.Generator().manual_seed(seed)
        made = [
            torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[1])
            if shape[0]
            else torch.zeros(shape)
            for shape in SHAPES
        ]
        return [x.flatten().to(self.g_dtype).to(self.device) for x in made]

    def take(self, seed, **more):
        g = self.gradients(seed)
        fused.adamw8_(
            self.p, g, self.m, self.v, *self.scales, self.step, self.aux, widths=self.widths, places=self.places,
            mode=self.mode, **SETTINGS, **more,
        )  # fmt: skip
        return g

    def tensors(self):
        return [*self.p, *self.aux, *self.m, *self.v, *self.scales[0], *self.scales[1], *self.step]

    def moments(self):
        """The moments that the codes stand for, in float64."""
        kinds = ((self.m, reference._FIRST), (self.v, reference._SECOND))
        return [
            [reference.from_codes(c, s, w, base).double() for c, s, w in zip(codes, scale, self.widths, strict=True)]
            for (codes, base), scale in zip(kinds, self.scales, strict=True)
        ]

    def values(self):
        if self.mode == "master":
            return [x.double() for x in self.aux]
        if self.mode == "remainder":
            whole = [torch.full_like(x, float("nan"), dtype=F32) for x in self.p]
            fused.merge_master_(self.p, self.aux, whole)
            return [x.double() for x in whole]
        return [x.double() for x in self.p]
