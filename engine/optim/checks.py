"""Checks of optimizers before their first step. Errors for those that would train nothing, because they were built
before their model was sharded, and those that keep states on the device although the policy offloads them. A warning
for those that may let ranks diverge, because they hold parameters that were added to the model after sharding."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from engine.notes import AWAITS_SHARDING, GRADIENT_IS_AVERAGED, REPLACED_AS, STATES_ON_HOST
from engine.ops.compilation import outside_graphs
from engine.tensors import is_shard

# {optimizer: its number of parameters} at its last check since a model was sharded, and at the last check of a step.
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_sharded: weakref.WeakKeyDictionary[torch.nn.Module, Callable[..., Iterable[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)
_hook: Any = None


def mark_replaced(before: Mapping[str, torch.Tensor]) -> None:
    """Note that these parameters have been replaced by shards; optimizers that hold one raise at their next step."""
    for name, parameter in before.items():
        REPLACED_AS.set(parameter, name)
    watch_optimizers()


def mark_awaiting_sharding(parameter: torch.Tensor) -> None:
    """Note that this parameter must be sharded before it is trained: until then the ranks would diverge."""
    AWAITS_SHARDING.set(parameter, True)
    watch_optimizers()


def mark_gradients_averaged(parameters: Iterable[torch.Tensor]) -> None:
    """Note that the gradients of these unsharded parameters have been averaged over the ranks."""
    for parameter in parameters:
        GRADIENT_IS_AVERAGED.set(parameter, True)


def mark_sharded(model: torch.nn.Module, gathered: Callable[[torch.nn.Module], Iterable[torch.Tensor]]) -> None:
    """Note how to find the whole parameters that a sharded model shows from forward to backward."""
    _sharded[model] = gathered


def watch_optimizers() -> None:
    """Check every optimizer before its next step, and again when its number of parameters changes."""
    global _hook
    _checked.clear()
    _hook = _hook or before_each_step(_check_step)


def before_each_step(check: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Call ``check`` before each step of any optimizer; it runs in Python also inside torch.compile."""
    return register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: outside_graphs(check)(optimizer))


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    check_optimizer(optimizer)
    if _stepped.get(optimizer) == (number := _number_of_parameters(optimizer)):
        return
    members = [p for group in optimizer.param_groups for p in group["params"]]
    if any(is_shard(p) and p.device_mesh.size() > 1 for p in members):
        for parameter in members:
            if is_shard(parameter) or parameter.numel() == 0 or GRADIENT_IS_AVERAGED.get(parameter):
                continue
            if parameter.grad is not None:
                # Not an error, since the caller may have averaged the gradient without telling.
                warnings.warn(
                    f"{type(optimizer).__name__} holds sharded parameters and one of shape {tuple(parameter.shape)} "
                    "that is not, whose gradient differs between ranks: unless you average it, the ranks diverge. Add "
                    "parameters before engine.shard(model), or train with engine.accumulate, which averages gradients",
                    stacklevel=2,
                )
                break
    _stepped[optimizer] = number


def _number_of_parameters(optimizer: torch.optim.Optimizer) -> int:
    """Tells whether a group was added."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def check_not_gathered(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if one of these is gathered for a forward: only its shard has a gradient."""
    gathered = _gathered()
    for parameter in parameters:
        if id(parameter) in gathered:
            raise ValueError(
                f"clipping was given gathered parameters (one of shape {tuple(parameter.shape)}), which a model shows "
                "between a forward and its backward, not the shards, which have the gradients: take them from "
                "optimizer.param_groups, or run that forward in torch.no_grad()"
            )


def _gathered() -> set[int]:
    """The ids of the whole parameters that sharded models show from forward to backward."""
    return {id(p) for model, find in _sharded.items() for p in find(model)}


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer holds parameters that ``engine.shard`` has replaced, that are not sharded yet,
    or that are gathered for a forward, or if it keeps states on the device that the policy offloads to the host."""
    if _checked.get(optimizer) == (number := _number_of_parameters(optimizer)):
        return
    gathered = _gathered()
    on_host = getattr(optimizer, "states_on_host", False)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := REPLACED_AS.get(parameter)) is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} was built before engine.shard, which replaced parameter {name} by "
                    "its shard: it would train nothing. Build the optimizer after engine.shard(model)"
                )
            if id(parameter) in gathered:
                raise ValueError(
                    f"{type(optimizer).__name__} was built between a forward and its backward, or given a group then, "
                    f"when the model showed its gathered parameters (one of shape {tuple(parameter.shape)}), not the "
                    "shards: it would train nothing. Do it right after engine.shard(model), or run that forward in "
                    "torch.no_grad()"
                )
            if AWAITS_SHARDING.get(parameter):
                raise ValueError(
                    f"{type(optimizer).__name__} was given a DistributedParameter of shape {tuple(parameter.shape)} "
                    "that is not sharded, so the ranks would diverge. Call init_parameters(model), load(model, file) "
                    "or BMTrainModelWrapper(model) before the optimizer is built"
                )
            if STATES_ON_HOST.get(parameter) and not on_host:
                raise ValueError(
                    f"the model's policy has offload, but {type(optimizer).__name__} keeps its states where the "
                    "parameters are: build engine.optim.AdamOffloadOptimizer, or leave offload out of the policy"
                )
    _checked[optimizer] = number
