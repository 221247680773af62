"""Finds an optimizer that was built before its model was sharded: it would step on tensors that nobody uses."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_NAME = "_engine_sharded_as"
_WAITING = "_engine_waits_for_sharding"
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hook: Any = None


def mark_stale(before: Mapping[str, torch.Tensor]) -> None:
    """Note that these parameters have been replaced by shards, and watch every optimizer's first step for them."""
    for name, parameter in before.items():
        setattr(parameter, _NAME, name)
    _watch()


def mark_unsharded(parameter: torch.Tensor) -> None:
    """Note that this parameter is to be sharded before it is trained: until then ranks train apart."""
    setattr(parameter, _WAITING, True)
    _watch()


def _watch() -> None:
    global _hook
    _checked.clear()
    _hook = _hook or register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: check_optimizer(optimizer))


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if the optimizer holds parameters from before ``engine.shard``, or that still wait for it."""
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := getattr(parameter, _NAME, None)) is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} was built before engine.shard, which replaced parameter {name} by "
                    "its shard: it would train nothing. Build the optimizer after engine.shard(model)"
                )
            if hasattr(parameter, _WAITING):
                raise ValueError(
                    f"{type(optimizer).__name__} was given a DistributedParameter of shape {tuple(parameter.shape)} "
                    "that is not sharded, so the ranks would train apart. Call init_parameters(model), "
                    "load(model, file) or BMTrainModelWrapper(model) before the optimizer is built"
                )
    _checked.add(optimizer)
