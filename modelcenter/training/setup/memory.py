"""The memory that the state of a run takes: weights, gradients, and the state of its optimizer."""

import math
from typing import NamedTuple

import torch

from engine.notes import policy_of, zero_level
from engine.shards import is_sharded
from engine.tensors import is_shard, local_tensor
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig

# Bytes of an optimizer's state per element of a parameter, without masters.
_MOMENTS = {"adamw": 8.0, "muon": 8.0, "lion": 4.0, "adamw8bit": 2.1, "adafactor": 0.1}


class StateBytes(NamedTuple):
    """Bytes on this rank.

    device: weights, gradients and optimizer state on the device. host: optimizer state that --offload keeps in host
    memory. gathered: weights and gradients that a step holds besides: whole ones below ZeRO level 3, and 16-bit copies
    in one process.
    """

    device: float
    host: float
    gathered: float


def state_bytes(cfg: TrainConfig, model: Model) -> StateBytes:
    """What training a model takes on this rank, without activations and, at level 3, without gathered units."""
    kept = gathered = 0
    level, policy, plain = zero_level(model), policy_of(model), not is_sharded(model)
    for parameter in model.parameters():
        local = local_tensor(parameter)
        kept += local.numel() * local.element_size() * (1 + parameter.requires_grad)
        if policy is not None and (plain or level < 3):
            whole, computed = _whole(parameter), policy.compute_dtype or parameter.dtype
            copied = (level > 0 and not plain) or computed != parameter.dtype
            gathered += whole * computed.itemsize * copied + whole * 4 * (level == 1 and parameter.requires_grad)
    states = optimizer_bytes(cfg, model)
    on_host = states if cfg.offload != "none" else 0.0
    return StateBytes(kept + states - on_host, on_host, gathered)


def _whole(parameter: torch.Tensor) -> int:
    """Number of elements that this rank computes with: the whole of a shard, but only its own part of a split layer."""
    local = local_tensor(parameter).numel()
    if not is_shard(parameter):
        return local
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    shards = (mesh.size(d) for d, p in enumerate(parameter.placements) if names[d] != "tp" and p.is_shard())
    return local * math.prod(shards)


def optimizer_bytes(cfg: TrainConfig, model: Model) -> float:
    """Bytes of moments and masters. 16-bit parameters have masters, as do all whose state is in host memory."""
    total = 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_master = parameter.dtype == torch.float32 and cfg.offload == "none"
            master = 0 if is_master or cfg.precision == "bf16-sr" else 4
            total += local_tensor(parameter).numel() * (_MOMENTS[cfg.optimizer] + master)
    return total
