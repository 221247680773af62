"""AdamW on local shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.notes import ROUNDING_KEY
from engine.ops import fused, library
from engine.optim.base import FusedOptimizer
from engine.optim.batch import Batch
from engine.optim.rounding import stochastic_round_

_CHUNK = 1 << 24  # elements that are cast to fp32 at a time


class AdamOptimizer(FusedOptimizer):
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) in one pass over memory.

    The kernel works on this rank's shards, so nothing is dispatched through DTensor. The states (``exp_avg``,
    ``exp_avg_sq`` and, for 16-bit parameters, ``master``, an fp32 copy) are placed as their parameter is, so that
    checkpoints reshard them. Weight decay is decoupled for every dtype (BMTrain's class couples it for fp32
    parameters). Without the compiled operators (``python -m engine.ops``) torch's fused kernel is used, with casts
    around it for 16-bit parameters; results then differ in the last bit.

    Each step computes a 16-bit parameter from its ``master``, so a value written only into the parameter (by
    ``model.load_state_dict``, a moving average or clamping) is lost in the next step: write it into the master, too
    (``optimizer.state[p]["master"].copy_(p)``). With a remainder this is not needed. In a step that is captured in a
    CUDA graph, lr, betas, eps and weight_decay are constants, which schedules cannot change.

    Args:
        params: parameters or groups, as in torch, of a model that is already sharded.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW, weight_decay 0 by default.
        hold_steps: the number of first steps that only update moments and change no parameter.
        master: how 16-bit parameters keep their fp32 values. "fp32": as a copy (``master``, 4 bytes per parameter).
            "remainder", for bf16: as the missing 16 bits (``remainder``, 2 bytes), with the same values.
        moment_dtype: torch.float32, or torch.bfloat16 for half the memory; the second moment then adapts slowly.

    Raises:
        ValueError: a value is out of its range, or a parameter is on meta.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        *,
        master: str = "fp32",
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, hold_steps, master, moment_dtype)

    def update(
        self, group: dict[str, Any], batch: Batch, gscale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        # The reference is slower than torch's kernel, so it only steps formats that torch's kernel cannot.
        if batch.fits and (library.serves(batch.p[0].device) or not self._ordinary(batch)):
            fused.adamw_(
                batch.p,
                batch.g,
                batch.m,
                batch.v,
                batch.steps,
                batch.aux,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                mode=batch.mode,
                gscale=gscale,
                found_inf=found_inf,
                places=batch.places,
            )
        else:
            _torch_step(group, batch, gscale, found_inf)

    def check(self, batch: Batch) -> None:
        if not batch.fits and not self._ordinary(batch):
            raise ValueError(
                f"a parameter of {batch.p[0].dtype} and strides {tuple(batch.p[0].stride())} needs master='fp32' and "
                "moment_dtype=torch.float32"
            )

    def _ordinary(self, batch: Batch) -> bool:
        """Whether torch's kernel can step this batch."""
        return self._moment_dtype == torch.float32 and batch.mode != "remainder"


def _torch_step(
    group: dict[str, Any], batch: Batch, gscale: torch.Tensor | None, found_inf: torch.Tensor | None
) -> None:
    """The step by torch's fused kernel, in chunks, to bound the memory of fp32 copies."""
    torch._foreach_add_(batch.steps, 1)
    divisor = None if gscale is None else gscale.reciprocal()
    begin = elements = 0
    for end in range(1, len(batch.p) + 1):
        elements += batch.p[end - 1].numel()
        if elements >= _CHUNK or end == len(batch.p):
            _torch_chunk(group, batch, slice(begin, end), divisor, found_inf)
            begin, elements = end, 0
    if found_inf is not None:
        torch._foreach_sub_(batch.steps, [found_inf] * len(batch.steps))


def _torch_chunk(
    group: dict[str, Any], batch: Batch, part: slice, divisor: torch.Tensor | None, found_inf: torch.Tensor | None
) -> None:
    kept = [i for i in range(*part.indices(len(batch.p))) if batch.p[i].numel()]  # kernels may not accept empty shards
    if not kept:
        return
    plain = batch.mode == "plain" and batch.p[0].dtype == torch.float32
    if batch.mode == "master":
        values = [batch.aux[i] for i in kept]
    else:
        values = [batch.p[i] if plain else batch.p[i].float() for i in kept]
    torch._fused_adamw_(
        values,
        [batch.g[i] if plain and batch.g[i].dtype == torch.float32 else batch.g[i].float() for i in kept],
        [batch.m[i] for i in kept],
        [batch.v[i] for i in kept],
        [],
        [batch.steps[i] for i in kept],
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        grad_scale=divisor,
        found_inf=found_inf,
    )
    if batch.mode == "master":
        torch._foreach_copy_([batch.p[i] for i in kept], values)
    elif batch.mode == "random":
        for i, value in zip(kept, values, strict=True):
            key = ROUNDING_KEY.get(batch.whole[i])
            stochastic_round_(batch.whole[i], value, key, batch.steps[i])  # exact where the step was skipped
