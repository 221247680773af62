"""Tensors on a device that remember their copy on the host, so that reading them need not wait for the device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_NAME = "_on_host"


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor of the host copied to the device, without waiting for a GPU; the copy remembers it. Anything else as it
    is."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    moved = value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
    if value.device.type == "cpu":
        setattr(moved, _NAME, value)
    return moved


def batch_to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch with its tensors on the device, as `to_device` copies them."""
    return {name: to_device(value, device) for name, value in batch.items()}


def host_copy(value: Any) -> Any:
    """The host's copy that a tensor remembers from `to_device`; a value without one as it is."""
    return getattr(value, _NAME, value)
