"""Lion on local shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.ops import fused
from engine.optim.base import FusedOptimizer
from engine.optim.batch import Batch


class Lion(FusedOptimizer):
    """Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023) in one pass over memory.

    It has one moment (``exp_avg``) where AdamW has two. The paper uses learning rates 3 to 10 times smaller than
    AdamW's, and weight decays larger by the same factor.

    Args:
        params, lr, betas, weight_decay, hold_steps, master, moment_dtype: as in ``AdamOptimizer``.

    Raises:
        ValueError: a value is out of its range, or a parameter is on meta.
    """

    moments = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        *,
        master: str = "fp32",
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, hold_steps, master, moment_dtype)

    def update(
        self, group: dict[str, Any], batch: Batch, gscale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        fused.lion_(
            batch.p,
            batch.g,
            batch.m,
            batch.steps,
            batch.aux,
            lr=group["lr"],
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            mode=batch.mode,
            gscale=gscale,
            found_inf=found_inf,
            places=batch.places,
        )

    def check(self, batch: Batch) -> None:
        if not batch.fits:
            raise ValueError(
                f"a parameter of {batch.p[0].dtype}, shape {tuple(batch.p[0].shape)} and strides "
                f"{tuple(batch.p[0].stride())} cannot be stepped: Lion takes contiguous fp32, bf16 and fp16 shards"
            )
