"""The optimizers in a checkpoint: their tensors by parameter name, so that any mesh and any order of groups fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine.checkpoint.model import read_tensors, stored_tensors
from engine.init import clean_name
from engine.parallel.stages import elsewhere, of_all_stages
from engine.torch_compat import detached, local_tensor, with_local

OPTIM = "optim"


def split_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """({"<optimizer>/<parameter>/<key>": tensor}, for each optimizer its groups and what is no tensor). Collective.

    Of a model that is split into stages: the tensors of this stage, and the groups of all. The tensors share the
    optimizers' memory. Raises ValueError if an optimizer holds a parameter that is not the model's.
    """
    names = _names(model)
    tensors: dict[str, torch.Tensor] = {}
    rest = []
    for index, optimizer in enumerate(optimizers):
        values: dict[str, dict[str, Any]] = {}
        groups = []
        for group in optimizer.param_groups:
            members = [_name_of(names, p, index) for p in group["params"]]
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": members})
            for name, parameter in zip(members, group["params"], strict=True):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"{index}/{name}/{key}"] = _placed(parameter, detached(value))
                    else:
                        values.setdefault(name, {})[key] = value
        rest.append({"param_groups": groups, "values": values})
    return tensors, _joined(of_all_stages(model, rest))


def _joined(stages: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One description of the optimizers from that of each stage; what two stages hold comes once."""
    first, *others = stages
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            for group, more in zip(mine["param_groups"], theirs["param_groups"], strict=True):
                group["params"] += [name for name in more["params"] if name not in group["params"]]
            mine["values"] |= theirs["values"]
    return first


def join_state(
    directory: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], rest: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The reverse: for each optimizer what its ``load_state_dict`` takes; each rank reads its slices. Collective.

    Raises ValueError if the optimizers differ in number, groups or parameters from those that were saved.
    """
    if len(rest) != len(optimizers):
        raise ValueError(f"checkpoint {directory} holds {len(rest)} optimizers, but {len(optimizers)} were given")
    names, others = _names(model), elsewhere(model)
    tensors: dict[str, torch.Tensor] = {}
    states: list[dict[str, Any]] = []
    places: list[dict[str, tuple[int, nn.Parameter]]] = []
    for index, (optimizer, saved) in enumerate(zip(optimizers, rest, strict=True)):
        if len(saved["param_groups"]) != len(optimizer.param_groups):
            raise ValueError(
                f"optimizer {index} has {len(saved['param_groups'])} parameter groups in checkpoint {directory} and "
                f"{len(optimizer.param_groups)} here"
            )
        place: dict[str, tuple[int, nn.Parameter]] = {}
        groups = []
        for number, (group, old) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
            members = [_name_of(names, p, index) for p in group["params"]]
            everywhere = {name for part in of_all_stages(model, members) for name in part}
            if different := sorted(everywhere ^ set(old["params"])):
                where = "only here" if different[0] in everywhere else "only in the checkpoint"
                raise ValueError(
                    f"group {number} of optimizer {index} has other parameters than in checkpoint {directory}: "
                    f"{different[0]} is {where}"
                )
            first = len(place)
            place |= {name: (first + i, p) for i, (name, p) in enumerate(zip(members, group["params"], strict=True))}
            groups.append({**old, "params": list(range(first, len(place)))})
        places.append(place)
        states.append({"state": {}, "param_groups": groups})
        for name, values in saved["values"].items():
            if name in place:  # and not on another stage
                states[index]["state"].setdefault(place[name][0], {}).update(values)
    if (directory / OPTIM).exists():
        for key, (shape, dtype) in stored_tensors(directory, OPTIM).items():
            number_text, name, key_of_state = _split(key)
            if name not in places[int(number_text)] and name in others:
                continue
            position, parameter = places[int(number_text)][name]
            tensor = _empty(parameter, shape, dtype)
            tensors[key] = tensor
            states[int(number_text)]["state"].setdefault(position, {})[key_of_state] = tensor
        read_tensors(directory / OPTIM, tensors)
    return states


def _split(key: str) -> tuple[str, str, str]:
    index, _, rest = key.partition("/")
    name, _, last = rest.rpartition("/")
    return index, name, last


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): clean_name(name) for name, p in model.named_parameters()}


def _name_of(names: dict[int, str], parameter: torch.Tensor, optimizer: int) -> str:
    if (name := names.get(id(parameter))) is None:
        raise ValueError(
            f"optimizer {optimizer} holds a parameter of shape {tuple(parameter.shape)} that is not in the model: "
            "build the optimizer from the model that is saved, after engine.shard"
        )
    return name


def _placed(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A state that an optimizer keeps as a plain tensor beside its shard is a shard too."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.ndim:
        if value.shape == local_tensor(parameter).shape:
            return with_local(parameter, value)
    return value


def _empty(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if isinstance(parameter, DTensor) and shape == tuple(parameter.shape):
        return with_local(parameter, torch.empty_like(local_tensor(parameter), dtype=dtype))
    return torch.empty(shape, dtype=dtype, device=parameter.device)
