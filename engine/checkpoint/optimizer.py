"""The optimizers in a checkpoint, with tensors by parameter name, so that any mesh and any order of groups fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import runtime
from engine.checkpoint.model import read_tensors, stored_tensors
from engine.collectives import from_rank_0, together
from engine.names import clean_name
from engine.ops import zero_pages
from engine.optim.base import FusedOptimizer
from engine.optim.states import OwnStates
from engine.parallel.pipeline.stages import elsewhere, gather_from_stages
from engine.tensors import detached, is_shard, local_tensor, with_local

OPTIM = "optim"


def collect_states(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """({"<optimizer>/<parameter>/<key>": tensor}, groups and other values of each optimizer). Not collective.

    In a pipeline these are the states of this stage; see ``merge_stages``. The tensors share memory with the
    optimizers' states. Raises ValueError if an optimizer holds a parameter that is not the model's.
    """
    names = _names(model)
    tensors: dict[str, torch.Tensor] = {}
    rest = []
    for index, optimizer in enumerate(optimizers):
        values: dict[str, dict[str, Any]] = {}
        groups = []
        for group, members in zip(optimizer.param_groups, _members(names, optimizer, index), strict=True):
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": members})
            for name, parameter in zip(members, group["params"], strict=True):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"{index}/{name}/{key}"] = _placed(parameter, detached(value))
                    else:
                        values.setdefault(name, {})[key] = value
        rest.append({"param_groups": groups, "values": values})
    return tensors, rest


def merge_stages(model: nn.Module, rest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the groups and values of the optimizers of all stages; parameters on two stages appear once. Collective.

    Raises ValueError if the stages have different numbers of optimizers or groups.
    """
    first, *others = stages = gather_from_stages(model, rest)
    _check_stages([[one["param_groups"] for one in stage] for stage in stages])
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            for group, more in zip(mine["param_groups"], theirs["param_groups"], strict=True):
                group["params"] += [name for name in more["params"] if name not in group["params"]]
            mine["values"] |= theirs["values"]
    return first


def load_states(
    directory: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], rest: list[dict[str, Any]]
) -> list[OwnStates]:
    """A state dict for each optimizer's ``load_state_dict``; each rank reads its slices. Collective.

    Raises ValueError if the optimizers differ in number, groups or parameters from those that were saved.
    """
    names = _names(model)
    with together(f"reading {directory}"):
        if len(rest) != len(optimizers):
            raise ValueError(f"checkpoint {directory} holds {len(rest)} optimizers, but {len(optimizers)} were given")
        members = [_members(names, optimizer, index) for index, optimizer in enumerate(optimizers)]
    everywhere = gather_from_stages(model, members)
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    tensors: dict[str, torch.Tensor] = {}
    states: list[OwnStates] = []
    has_tensors = from_rank_0(runtime.rank() == 0 and (directory / OPTIM).exists())
    with together(f"reading {directory}"):
        _check_stages(everywhere)
        places = []
        for index, (optimizer, saved) in enumerate(zip(optimizers, rest, strict=True)):
            _check_groups(directory, index, [stage[index] for stage in everywhere], saved["param_groups"])
            place, groups = _places(optimizer, members[index], saved["param_groups"])
            places.append(place)
            states.append(OwnStates(state={}, param_groups=groups))
            for name, values in saved["values"].items():
                if name in place:  # otherwise it is on another stage
                    states[index]["state"].setdefault(place[name][0], {}).update(values)
        others = elsewhere(model)
        if has_tensors:
            stored = stored_tensors(directory, OPTIM)
        for key, (shape, dtype) in stored.items():
            index_text, name, key_of_state = _split(key)
            index = int(index_text)
            if name not in places[index] and name in others:
                continue
            position, parameter = places[index][name]
            tensors[key] = tensor = _empty(optimizers[index], parameter, shape, dtype)
            states[index]["state"].setdefault(position, {})[key_of_state] = tensor
    if has_tensors:
        read_tensors(directory / OPTIM, tensors)
        tensors.clear()  # to free the tensors that are not kept
        _leave_zeros_unwritten(states)
    return states


def _leave_zeros_unwritten(states: list[OwnStates]) -> None:
    """Release the memory of zeros that took none before the save, because they had never been written."""
    for state in states:
        for values in state["state"].values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and zero_pages.mostly_zero_rows(local_tensor(value)):
                    values[key] = with_local(value, zero_pages.copy_of(local_tensor(value)))


def _check_stages(stages: list[list[list[Any]]]) -> None:
    """Raise ValueError unless all stages have the same number of optimizers, with the same numbers of groups."""
    numbers = [[len(groups) for groups in optimizers] for optimizers in stages]
    for stage, own in enumerate(numbers):
        if own != numbers[0]:
            raise ValueError(
                f"the numbers of parameter groups of the optimizers are {own} on stage {stage} of the pipeline and "
                f"{numbers[0]} on stage 0: give every stage the same optimizers and groups, empty ones too"
            )


def _check_groups(
    directory: Path, index: int, stages: list[list[list[str]]], saved_groups: list[dict[str, Any]]
) -> None:
    """Raise ValueError if the groups of an optimizer, on all stages together, differ by names from the saved ones."""
    if len(saved_groups) != len(stages[0]):
        raise ValueError(
            f"optimizer {index} has {len(saved_groups)} parameter groups in checkpoint {directory} and "
            f"{len(stages[0])} here"
        )
    for number, old in enumerate(saved_groups):
        everywhere = {name for groups in stages for name in groups[number]}
        if different := sorted(everywhere ^ set(old["params"])):
            where = "only here" if different[0] in everywhere else "only in the checkpoint"
            raise ValueError(
                f"the parameters of group {number} of optimizer {index} differ from those in checkpoint {directory}: "
                f"{different[0]} is {where}"
            )


def _places(
    optimizer: torch.optim.Optimizer, members: list[list[str]], saved_groups: list[dict[str, Any]]
) -> tuple[dict[str, tuple[int, nn.Parameter]], list[dict[str, Any]]]:
    """({name: (position in the optimizer, parameter)}, the saved groups with positions instead of names)."""
    place: dict[str, tuple[int, nn.Parameter]] = {}
    groups = []
    for group, names, old in zip(optimizer.param_groups, members, saved_groups, strict=True):
        first = len(place)
        place |= {name: (first + i, p) for i, (name, p) in enumerate(zip(names, group["params"], strict=True))}
        groups.append({**old, "params": list(range(first, len(place)))})
    return place, groups


def _split(key: str) -> tuple[str, str, str]:
    index, _, rest = key.partition("/")
    name, _, last = rest.rpartition("/")
    return index, name, last


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): clean_name(name) for name, p in model.named_parameters()}


def _members(names: dict[int, str], optimizer: torch.optim.Optimizer, index: int) -> list[list[str]]:
    """The names of the parameters of each group."""
    return [[_name_of(names, p, index) for p in group["params"]] for group in optimizer.param_groups]


def _name_of(names: dict[int, str], parameter: torch.Tensor, optimizer: int) -> str:
    if (name := names.get(id(parameter))) is None:
        raise ValueError(
            f"optimizer {optimizer} holds a parameter of shape {tuple(parameter.shape)} that is not in the model: "
            "build the optimizer from the model that is saved, after engine.shard"
        )
    return name


def _placed(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A state placed as its parameter is, if the optimizer keeps it as a plain tensor of the shard's shape."""
    if is_shard(parameter) and not is_shard(value) and value.ndim:
        if value.shape == local_tensor(parameter).shape:
            return with_local(parameter, value)
    return value


def _empty(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Empty memory for a state, on the device where the optimizer keeps it."""
    device = optimizer.state_device(parameter) if isinstance(optimizer, FusedOptimizer) else parameter.device
    if shape == tuple(parameter.shape):
        return with_local(parameter, torch.empty_like(local_tensor(parameter), dtype=dtype, device=device))
    return torch.empty(shape, dtype=dtype, device=device)
