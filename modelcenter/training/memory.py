"""What the state of a run takes: weights, gradients, and what its optimizer keeps."""

from typing import NamedTuple

import torch

from engine.torch_compat import local_tensor
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig

# Bytes of an optimizer's state for each element of a parameter, masters apart.
_MOMENTS = {"adamw": 8.0, "muon": 8.0, "lion": 4.0, "adamw8bit": 2.1, "adafactor": 0.1}


class StateBytes(NamedTuple):
    """Of this rank, between two steps. device: weights, gradients and states there. host: states of --offload."""

    device: float
    host: float


def state_bytes(cfg: TrainConfig, model: Model) -> StateBytes:
    """What training a model takes on this rank, activations and gathered weights apart."""
    weights = gradients = 0
    for parameter in model.parameters():
        local = local_tensor(parameter)
        weights += local.numel() * local.element_size()
        gradients += local.numel() * local.element_size() if parameter.requires_grad else 0
    states = optimizer_bytes(cfg, model)
    if cfg.offload == "optimizer":
        return StateBytes(weights + gradients, states)
    return StateBytes(weights + gradients + states, 0.0)


def optimizer_bytes(cfg: TrainConfig, model: Model) -> float:
    """The moments, and masters: of 16-bit parameters, and of all whose states are kept on the host."""
    total = 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            own = parameter.dtype == torch.float32 and cfg.offload != "optimizer"
            master = 0 if own or cfg.precision == "bf16-sr" else 4
            total += local_tensor(parameter).numel() * (_MOMENTS[cfg.optimizer] + master)
    return total
