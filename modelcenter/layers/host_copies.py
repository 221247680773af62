"""Device tensors that keep a reference to their copy on the host, so that reading it does not synchronise."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_NAME = "_on_host"


def to_device(value: Any, device: torch.device) -> Any:
    """Copy a host tensor to the device without waiting for a GPU; the copy keeps a reference to it. Anything else is
    returned unchanged."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    moved = value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
    if value.device.type == "cpu":
        setattr(moved, _NAME, value)
    return moved


def batch_to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch with its tensors copied by `to_device`."""
    return {name: to_device(value, device) for name, value in batch.items()}


def host_copy(value: Any) -> Any:
    """The host tensor from which `to_device` copied `value`; a value that it did not copy is returned unchanged."""
    return getattr(value, _NAME, value)
