"""AdamW with 8-bit moments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from engine.ops import fused
from engine.ops.reference import BLOCK
from engine.optim.adam import AdamOptimizer
from engine.optim.batch import Batch
from engine.optim.states import placed_as
from engine.tensors import as_shard, is_shard, local_box, local_tensor

_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


class AdamW8bit(AdamOptimizer):
    """``AdamOptimizer`` with both moments quantised to 8 bits in blocks (Dettmers et al. 2022, arXiv:2110.02861), while
    parameters keep exact fp32 values.

    A block is 128 elements of a row (the last dimension) with an fp32 scale; its elements are 8-bit floats times the
    scale. The second moment is rounded stochastically by (parameter, step, place), so that it follows changes below its
    precision. ``engine.shard`` numbers the parameters for this, also in one process; otherwise all of them use the same
    random bits. Blocks do not cross the end of a row, so shards of rows hold whole blocks: parameters are the same, bit
    for bit, in one process and on any mesh, and states reshard (``exp_avg_scale``, ``exp_avg_sq_scale``: one number per
    block, placed as the rows are). Vectors and parameters of fewer than ``min_size`` elements keep fp32 moments.

    Args:
        params, lr, betas, eps, weight_decay, hold_steps: as in ``AdamOptimizer``.
        master: as there, but "remainder" by default: 8 bytes per bf16 parameter with its gradient, where AdamW has 16.
        min_size: the number of elements of the whole parameter from which its moments have 8 bits.

    Raises:
        ValueError: as ``AdamOptimizer``; or ranks cut the rows of a parameter inside a block (tensor parallelism of a
            row that is not a multiple of 128 times the ranks) or cut more than two of its dimensions, or a loaded state
            has moments of another kind.
    """

    _settings = (*AdamOptimizer._settings, "_min_size")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        *,
        master: str = "remainder",
        min_size: int = 4096,
    ) -> None:
        if not isinstance(min_size, int) or min_size < 1:
            raise ValueError(f"min_size is {min_size!r}, expected a whole number of at least 1")
        self._min_size = min_size
        super().__init__(params, lr, betas, eps, weight_decay, hold_steps, master=master)

    def _quantised(self, parameter: torch.Tensor) -> bool:
        return parameter.ndim > 1 and parameter.numel() >= self._min_size

    def _init_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = super()._init_state(parameter)
        if self._quantised(parameter):
            for name, scale in zip(self.moments, _SCALES, strict=True):
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                shape, size = _scales_of(parameter)
                state[scale] = torch.zeros(size, dtype=torch.float32, device=parameter.device)
                if is_shard(parameter):
                    state[scale] = as_shard(state[scale], shape, parameter.device_mesh, parameter.placements)
        return state

    def update(
        self, group: dict[str, Any], batch: Batch, gscale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        if batch.m[0].dtype != torch.uint8:
            super().update(group, batch, gscale, found_inf)
            return
        states = [self.state[parameter] for parameter in batch.whole]
        m_scale, v_scale = ([local_tensor(state[name]) for state in states] for name in _SCALES)
        fused.adamw8_(
            batch.p,
            batch.g,
            batch.m,
            batch.v,
            m_scale,
            v_scale,
            batch.steps,
            batch.aux,
            widths=[max(1, shard.shape[-1]) for shard in batch.p],
            places=batch.places,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            mode=batch.mode,
            gscale=gscale,
            found_inf=found_inf,
        )

    def check(self, batch: Batch) -> None:
        if batch.m[0].dtype != torch.uint8:
            super().check(batch)
        elif not batch.fits:
            raise ValueError(
                f"a parameter of {batch.p[0].dtype}, shape {tuple(batch.p[0].shape)} and strides "
                f"{tuple(batch.p[0].stride())} cannot be stepped: AdamW8bit takes contiguous fp32, bf16 and fp16 "
                "shards that cut at most two dimensions"
            )

    def _dtype_of(self, name: str, parameter: torch.Tensor) -> torch.dtype:
        if name in self.moments and self._quantised(parameter):
            return torch.uint8
        return super()._dtype_of(name, parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``AdamOptimizer``."""
        super().load_state_dict(state_dict)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state.get(parameter, {})
            for name in _SCALES:
                if name in state:
                    _scales_of(parameter)
                    state[name] = placed_as(state[name], parameter)


def _scales_of(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of the whole, shape of this rank's part) of the scales of a parameter.

    Raises ValueError if its shards do not hold whole blocks.
    """
    shape = (*parameter.shape[:-1], -(-parameter.shape[-1] // BLOCK))
    if not is_shard(parameter):
        return shape, shape
    mesh, placements = parameter.device_mesh, parameter.placements
    size, offset = local_box(parameter.shape, mesh, placements)
    wanted = ((*size[:-1], -(-size[-1] // BLOCK)), (*offset[:-1], offset[-1] // BLOCK))
    found = local_box(shape, mesh, placements)
    whole = offset[-1] % BLOCK == 0 and (size[-1] % BLOCK == 0 or offset[-1] + size[-1] == parameter.shape[-1])
    if math.prod(size) and not (whole and found == wanted):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is cut inside its rows into parts of {size[-1]}, which are "
            f"not whole blocks of {BLOCK}: use fewer ranks of tensor parallelism, or an AdamOptimizer for it"
        )
    return shape, found[0]
