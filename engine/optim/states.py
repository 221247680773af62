"""Checks and conversions of what an optimizer is given: groups, gradients and saved states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from numbers import Real
from typing import Any

import torch

from engine import runtime
from engine.tensors import are_plain, is_shard, local_tensor, part_of, placements_of, shard_of, whole_of, with_local

_FLAGS = ("amsgrad", "maximize", "differentiable")  # torch's, which change what a step does


class OwnStates(dict[str, Any]):
    """A state dict whose tensors nothing else uses: ``load_state_dict`` takes them as states without a copy."""


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a tensor with one element."""
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def check_group(group: dict[str, Any], *names: str, flags: Collection[str] = ()) -> None:
    """Raise ValueError if one of the named values (default: lr and weight_decay) is below 0, a parameter is on meta, or
    the group sets a flag of torch that the optimizer does not support (``flags``: the supported ones)."""
    for name in names or ("lr", "weight_decay"):
        if name in group and not (is_number(group[name]) and group[name] >= 0):
            raise ValueError(f"{name} is {group[name]!r}, expected a number of at least 0")
    for flag in _FLAGS:
        if group.get(flag) and flag not in flags:
            raise ValueError(
                f"{flag} of a parameter group is {group[flag]!r}, which this optimizer does not support: leave it out, "
                "or use torch's optimizer"
            )
    if any(p.is_meta for p in group["params"]):
        raise ValueError("a parameter is on the meta device: call engine.materialize(model) before the optimizer")


def undone_on_error(add: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    """Decorate an ``add_param_group`` that raises ValueError after adding a group: the group is removed again."""

    @functools.wraps(add)
    def call(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        before = len(self.param_groups)
        try:
            add(self, param_group)
        except ValueError:
            del self.param_groups[before:]
            raise

    return call


def sparse_gradient(shape: torch.Size) -> ValueError:
    """The error for a gradient that is not strided."""
    return ValueError(
        f"a parameter of shape {tuple(shape)} has a sparse gradient, expected a dense one: build its embedding with "
        "sparse=False, or step it by torch.optim.SparseAdam without an OptimManager"
    )


def check_gradients(groups: Iterable[dict[str, Any]]) -> None:
    """Raise ValueError if a parameter of these groups has a sparse gradient; called before any of them is stepped."""
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise sparse_gradient(parameter.shape)


def placed_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient, placed as the parameter is, where it is left so; partial gradients are summed over the
    ranks. Collective if it was placed otherwise."""
    gradient = parameter.grad
    assert gradient is not None
    if not placed_alike([parameter], [gradient]):
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return gradient


def placed_alike(params: list[torch.Tensor], gradients: list[torch.Tensor]) -> bool:
    """Whether each gradient is placed as its parameter is. Fast for many parameters if all are shards, or none."""
    if are_plain(gradients):
        return True
    try:
        return list(map(placements_of, gradients)) == list(map(placements_of, params))
    except AttributeError:  # some are plain
        return all(placements_of(p) == placements_of(g) for p, g in zip(params, gradients, strict=True) if is_shard(g))


def scalar_on(device: torch.device, number: torch.Tensor) -> torch.Tensor:
    """Copy a 0-d tensor to a device. Copies to a GPU need no wait, as its stream orders them before their uses; a copy
    to the host must be waited for."""
    return number.to(device, non_blocking=device.type == "cuda")


def saved_states(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """(parameter, its state in ``state_dict``, perhaps empty) for each parameter, paired by order as in torch."""
    _check_form(optimizer, state_dict)
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    theirs = [index for group in state_dict["param_groups"] for index in group["params"]]
    for parameter, index in zip(ours, theirs, strict=False):  # torch raises if their numbers differ
        yield parameter, state_dict["state"].get(index, {})


def _check_form(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(
            f"a state of {type(optimizer).__name__} has state and param_groups, but this one has "
            f"{', '.join(map(str, state_dict)) or 'nothing'}: pass the result of its state_dict()"
        )
    here = (runtime.stage(), runtime.stages())
    if (saved := tuple(state_dict.get("stage", here))) != here:
        place = "in no pipeline" if here[1] == 1 else f"on stage {here[0]} of {here[1]}"
        raise ValueError(
            f"a state of {type(optimizer).__name__} is from stage {saved[0]} of the {saved[1]} of a pipeline, but this "
            f"rank is {place}, and each stage has its own parameters. Save one state per stage and load it there, or "
            "use engine.save_checkpoint, whose files fit any number of stages"
        )
    if "shards" in state_dict and state_dict["shards"] != _held_parts(state_dict):
        raise ValueError(
            f"a state of {type(optimizer).__name__} holds the shards of another rank than this one, rank "
            f"{runtime.rank()}: save one file per rank, or one file with whole states from state_dict(gather_opt=True) "
            "of the OptimManager"
        )


def as_adamw_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a state that another library's AdamW may have saved: step counts that are numbers become tensors.

    Raises ValueError for states with AdamW's names from torch's Adam with weight decay, RAdam or NAdam.
    """
    _check_form(optimizer, state_dict)
    kind = type(optimizer).__name__
    groups = []
    for number, group in enumerate(state_dict["param_groups"]):
        if "decoupled_weight_decay" in group:  # written by all of these, and only AdamW's is True
            if "amsgrad" not in group:
                raise ValueError(
                    f"group {number} of the state has decoupled_weight_decay and no amsgrad, like that of torch's "
                    f"RAdam or NAdam, whose steps differ from those of {kind}: load it with the optimizer it was saved "
                    "with"
                )
            if not group["decoupled_weight_decay"] and group.get("weight_decay"):
                raise ValueError(
                    f"group {number} of the state has weight_decay {group['weight_decay']} that is not decoupled, as "
                    f"in torch's Adam, while that of {kind} is: load it with torch.optim.Adam, or set weight_decay to "
                    "0 there"
                )
            group = {**group, "decoupled_weight_decay": True}
        groups.append(group)
    states = {
        index: {**state, "step": torch.tensor(float(state["step"]))} if isinstance(state.get("step"), Real) else state
        for index, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states, "param_groups": groups}


def check_states(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    shapes: Callable[[torch.Tensor], dict[str, tuple[int, ...]]],
    known: Collection[str] | None = None,
) -> None:
    """Raise ValueError if ``state_dict`` is from another kind of optimizer, or from other parameters.

    Args:
        shapes: {name: shape of the whole} of the states that a parameter must have if it has any.
        known: names of further states that it may have; None: any.
    """
    _check_form(optimizer, state_dict)
    kind = type(optimizer).__name__
    for number, group in enumerate(state_dict["param_groups"]):
        if lacking := sorted(set(optimizer.defaults) - set(group) - set(_FLAGS)):
            raise ValueError(
                f"group {number} of the state has no {', '.join(lacking)}, which {kind} needs, so it is from another "
                "optimizer: load it with the one it was saved with"
            )
    for parameter, state in saved_states(optimizer, state_dict):
        wanted = shapes(parameter) if state else {}
        if lacking := [name for name in wanted if name not in state]:
            raise ValueError(
                f"the state of a parameter of shape {tuple(parameter.shape)} has {', '.join(sorted(state))} and no "
                f"{', '.join(lacking)}, which {kind} needs: load it with the optimizer it was saved with"
            )
        if strange := [name for name in state if known is not None and name not in wanted and name not in known]:
            raise ValueError(
                f"the state of a parameter of shape {tuple(parameter.shape)} has {', '.join(strange)}, which {kind} "
                "does not have: load it with the optimizer it was saved with"
            )
        for name, shape in wanted.items():
            if tuple(state[name].shape) != tuple(shape):
                raise ValueError(
                    f"state {name} of a parameter of shape {tuple(parameter.shape)} has shape "
                    f"{tuple(state[name].shape)}, expected {tuple(shape)}: give the optimizer the same parameters, in "
                    "the same order, as the saved one"
                )


def placed_as(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a state, whole or sharded, placed as the parameter is. Collective if it is sharded
    otherwise."""
    if not is_shard(parameter):
        return whole_of(value)
    mesh, placements = parameter.device_mesh, parameter.placements
    if is_shard(value) and value.device_mesh == mesh and value.placements == placements:
        return value
    whole = whole_of(value)
    if whole.shape == parameter.shape:  # stay on its device, which is not the mesh's if the state is offloaded
        return with_local(parameter, part_of(whole, mesh, placements))
    return shard_of(whole, mesh, placements)


def _held_parts(state_dict: dict[str, Any]) -> dict[int, tuple[int, ...]]:
    """{number of a parameter: coordinates of this rank's part of its states in their mesh}, for sharded states."""
    parts = {}
    for index, state in state_dict["state"].items():
        shard = next((value for value in state.values() if is_shard(value)), None)
        if shard is not None:
            # A mesh that was read from a file has the coordinates of the rank that wrote it.
            here = (shard.device_mesh.mesh == runtime.rank()).nonzero().flatten().tolist()
            parts[index] = tuple(0 if p.is_replicate() else c for p, c in zip(shard.placements, here, strict=False))
    return parts


def with_parts(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Add to an optimizer's state dict which parts of sharded states this rank holds, as shards in a file do not say
    whose they are. That of a FusedOptimizer has them already."""
    parts = {} if "shards" in state_dict else _held_parts(state_dict)
    return {**state_dict, "shards": parts} if parts else state_dict


def whole_states(state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with whole states on the CPU instead of shards; in a pipeline, also with the number of
    the stage whose parameters they belong to. Collective."""
    states = {i: {name: _whole(v) for name, v in state.items()} for i, state in state_dict["state"].items()}
    place = {"stage": (runtime.stage(), runtime.stages())} if runtime.stages() > 1 else {}
    kept = {name: value for name, value in state_dict.items() if name != "shards"}
    return {**kept, "state": states, **place}


def _whole(value: Any) -> Any:
    return whole_of(value).cpu() if isinstance(value, torch.Tensor) else value


def with_placed_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict for an optimizer that loads states unchanged: those with the parameter's shape, which may be whole,
    are placed as the parameter is."""
    _check_form(optimizer, state_dict)
    placed = {name: value for name, value in state_dict.items() if name != "shards"}
    placed["state"] = {index: {**state} for index, state in state_dict["state"].items()}
    for parameter, state in saved_states(optimizer, placed):
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = placed_as(value, parameter)
    return placed


def with_strides_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A state with the parameter's shape, given the parameter's strides; other states unchanged."""
    local, like = local_tensor(value), local_tensor(parameter)
    if local.shape != like.shape or local.stride() == like.stride():
        return value
    return with_local(value, torch.empty_like(like, dtype=local.dtype, device=local.device).copy_(local))
