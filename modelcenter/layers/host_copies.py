"""Tensors on a device that remember their copy on the host, so that reading them there waits for no device."""

from typing import Any

import torch
from torch import Tensor

_NAME = "_on_host"


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor of the host on the device, copied without waiting where that is a GPU; anything else as it is."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    moved = value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
    if value.device.type == "cpu":
        setattr(moved, _NAME, value)
    return moved


def host_copy(value: Any) -> Any:
    """The copy on the host that a tensor remembers, which nobody has changed; else the value itself."""
    return getattr(value, _NAME, value)
