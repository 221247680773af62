"""Finds an optimizer that was built before its model was sharded: it would step on tensors that nobody uses."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_NAME = "_engine_sharded_as"
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hook: Any = None


def mark_stale(before: Mapping[str, torch.Tensor]) -> None:
    """Note that these parameters have been replaced by shards, and watch every optimizer's first step for them."""
    global _hook
    for name, parameter in before.items():
        setattr(parameter, _NAME, name)
    _checked.clear()
    _hook = _hook or register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: check_optimizer(optimizer))


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if the optimizer holds parameters from before ``engine.shard``."""
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := getattr(parameter, _NAME, None)) is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} was built before engine.shard, which replaced parameter {name} by "
                    "its shard: it would train nothing. Build the optimizer after engine.shard(model)"
                )
    _checked.add(optimizer)
