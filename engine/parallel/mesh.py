"""The device mesh: five named dimensions, of which data parallelism uses two."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Outermost first: ranks next to each other (one machine) share a tensor-parallel group.
DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def build_mesh(device_type: str, world_size: int, dp_replicate: int) -> DeviceMesh:
    """The mesh of all ranks with ``dp_replicate`` copies; made once for each layout. Collective at first use."""
    return _build(device_type, (1, dp_replicate, world_size // dp_replicate, 1, 1), dist.group.WORLD)


def data_mesh(mesh: DeviceMesh, zero_level: int) -> DeviceMesh:
    """The part of ``mesh`` that ``fully_shard`` works on.

    Level 0 is hybrid sharding over shards of one rank: (dp_replicate = all, dp_shard = 1). Levels 1 to 3: (dp_shard)
    alone, or (dp_replicate, dp_shard) where there are several copies.
    """
    if zero_level == 0 and mesh["dp_shard"].size() > 1:
        mesh = build_mesh(mesh.device_type, mesh.size(), mesh.size())
    if zero_level == 0 or mesh["dp_replicate"].size() > 1:
        return mesh["dp_replicate", "dp_shard"]
    return mesh["dp_shard"]


@functools.lru_cache(maxsize=8)
def _build(device_type: str, sizes: tuple[int, ...], group: dist.ProcessGroup | None) -> DeviceMesh:
    # A mesh dies with the process group it was made in, so the group is part of the key.
    return init_device_mesh(device_type, sizes, mesh_dim_names=DIMS)
