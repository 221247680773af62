"""The device mesh: five named dimensions, of pipelines, data (two), context and tensor parallelism."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine import runtime
from engine.torch_compat import forget_meshes, set_timeout

# Outermost first: ranks next to each other (one machine) share a tensor-parallel group.
DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

Args = TypeVarTuple("Args")
Made = TypeVar("Made")

_made: dict[Any, Any] = {}  # what functions under ``once_per_world`` made
_groups: list[dist.ProcessGroup] = []  # whose collectives raise after the timeout
_world: dist.ProcessGroup | None = None  # in which these two were filled
_inherited: list[object] = []


def once_per_world(make: Callable[[*Args], Made]) -> Callable[[*Args], Made]:
    """``functools.cache`` for meshes, groups and what holds them: they live as long as the process group that they were
    made in. A mesh of a later one may be equal to a mesh of an earlier one, whose groups are gone."""

    @functools.wraps(make)
    def kept(*args: *Args) -> Made:
        global _world
        if _world is not dist.group.WORLD:
            if _world is not None:
                forget_meshes()
            _made.clear()
            _groups.clear()
            _world = dist.group.WORLD
        if (make, args) not in _made:
            _made[make, args] = make(*args)
        made: Made = _made[make, args]
        return made

    return kept


def device_mesh() -> DeviceMesh:
    """The mesh in force: five named dimensions, outermost first: pp, dp_replicate, dp_shard, cp, tp."""
    runtime.ensure_group()
    settings = runtime.current()
    sizes = settings.dp_replicate, settings.cp_size, settings.tp_size, settings.pp_size
    return build_mesh(runtime.device().type, runtime.world_size(), *sizes)


def build_mesh(
    device_type: str, world_size: int, dp_replicate: int, cp_size: int = 1, tp_size: int = 1, pp_size: int = 1
) -> DeviceMesh:
    """The mesh of all ranks with ``dp_replicate`` copies; made once for each layout. Collective at first use."""
    shards = world_size // (pp_size * dp_replicate * cp_size * tp_size)
    return _build(device_type, (pp_size, dp_replicate, shards, cp_size, tp_size))


def storage_mesh(mesh: DeviceMesh, zero_level: int, over_stages: bool = False) -> DeviceMesh:
    """The mesh on which parameters are placed: the ranks of ``mesh`` in the same order.

    Ranks that share the tokens of a sequence (cp) share the parameters as those with other data do, so cp is a part of
    dp_shard here. At level 0 all of it is dp_replicate: hybrid sharding over shards of one rank. With ``over_stages``
    so are the stages of a pipeline (pp), for parameters that all of them use.
    """
    pipe, copies, shards, cp, tp = (mesh[name].size() for name in DIMS)
    if over_stages:
        pipe, shards = 1, shards * pipe
    sizes = (pipe, copies, shards * cp, 1, tp)
    if zero_level == 0:
        sizes = (pipe, copies * shards * cp, 1, 1, tp)
    if sizes == tuple(mesh[name].size() for name in DIMS):
        return mesh
    return _build(mesh.device_type, sizes)


def data_mesh(mesh: DeviceMesh, zero_level: int, over_stages: bool = False) -> DeviceMesh:
    """The part of ``storage_mesh`` that ``fully_shard`` works on.

    Level 0: (dp_replicate, dp_shard) with shards of one rank. Levels 1 to 3: (dp_shard) alone, or (dp_replicate,
    dp_shard) where there are several copies.
    """
    mesh = storage_mesh(mesh, zero_level, over_stages)
    if zero_level == 0 or mesh["dp_replicate"].size() > 1:
        return mesh["dp_replicate", "dp_shard"]
    return mesh["dp_shard"]


@once_per_world
def _build(device_type: str, sizes: tuple[int, ...]) -> DeviceMesh:
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=DIMS)
    for name in DIMS:
        with_timeout(mesh.get_group(name))
    return mesh


def set_timeouts(seconds: float, everyone: bool) -> None:
    """Let collectives of the groups made so far, and with ``everyone`` those of all ranks, raise after so many
    seconds."""
    for group in _groups:
        set_timeout(group, seconds)
    if everyone and dist.group.WORLD is not None:
        set_timeout(dist.group.WORLD, seconds)


def with_timeout(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """``group``, whose collectives raise after the timeout of ``init_distributed``, also of a later call."""
    if group is dist.group.WORLD:  # a dimension of all ranks: its timeout was given, or is its maker's
        return group
    _groups.append(group)
    set_timeout(group, runtime.current().timeout)  # torch gives those of a mesh 30 minutes
    return group


def _forget_after_fork() -> None:
    """Keep the parent's groups alive in a forked process: without their threads, their end would wait for ever."""
    global _made, _groups, _world
    _inherited.append((_made, _groups, _world))
    _made, _groups, _world = {}, [], None


os.register_at_fork(after_in_child=_forget_after_fork)
