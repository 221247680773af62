"""The device mesh. Its five named dimensions are pipeline, data (two), context and tensor parallelism."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine import runtime
from engine.torch_compat import forget_meshes, set_timeout

# Outermost first: neighbouring ranks (on one machine) share a tensor-parallel group.
DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

Args = TypeVarTuple("Args")
Made = TypeVar("Made")

_made: dict[Any, Any] = {}  # the cache of ``once_per_world``
_groups: list[dist.ProcessGroup] = []  # the groups whose collectives raise after the timeout
_world: dist.ProcessGroup | None = None  # the default group to which these two belong
_inherited: list[object] = []


def once_per_world(make: Callable[[*Args], Made]) -> Callable[[*Args], Made]:
    """``functools.cache`` for meshes, groups and what holds them, which live as long as the default process group. A
    mesh of a later default group may compare equal to one of an earlier, whose groups no longer exist."""

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
    """The mesh of the current settings. Dimensions, outermost first: pp, dp_replicate, dp_shard, cp, tp."""
    runtime.ensure_group()
    settings = runtime.current()
    sizes = settings.dp_replicate, settings.cp_size, settings.tp_size, settings.pp_size
    return build_mesh(runtime.device().type, runtime.world_size(), *sizes)


def build_mesh(
    device_type: str, world_size: int, dp_replicate: int, cp_size: int = 1, tp_size: int = 1, pp_size: int = 1
) -> DeviceMesh:
    """The mesh of all ranks with ``dp_replicate`` copies. Cached for each layout; collective on first use."""
    shards = world_size // (pp_size * dp_replicate * cp_size * tp_size)
    return _build(device_type, (pp_size, dp_replicate, shards, cp_size, tp_size))


def storage_mesh(mesh: DeviceMesh, zero_level: int, over_stages: bool = False) -> DeviceMesh:
    """The mesh on which parameters are placed: the ranks of ``mesh`` in the same order.

    Parameters are sharded over ranks that share a sequence (cp) just as over ranks with different data, so cp is part
    of dp_shard here. At level 0 all of dp_shard becomes dp_replicate: hybrid sharding with shards of one rank. With
    ``over_stages``, the stages of a pipeline (pp) also become part of dp_shard, for parameters that all stages use.
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
    """Set the timeout, in seconds, of the groups made so far, and with ``everyone`` of the default group too."""
    for group in _groups:
        set_timeout(group, seconds)
    if everyone and dist.group.WORLD is not None:
        set_timeout(dist.group.WORLD, seconds)


def with_timeout(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """``group``, with the timeout of ``init_distributed`` from now on, including later calls of that."""
    if group is dist.group.WORLD:  # its timeout was set by init_distributed, or by the user who made it
        return group
    _groups.append(group)
    set_timeout(group, runtime.current().timeout)  # torch gives those of a mesh 30 minutes
    return group


def _forget_after_fork() -> None:
    """Keep the parent's groups alive in a forked process, where destroying them would wait for threads forever."""
    global _made, _groups, _world
    _inherited.append((_made, _groups, _world))
    _made, _groups, _world = {}, [], None


os.register_at_fork(after_in_child=_forget_after_fork)
