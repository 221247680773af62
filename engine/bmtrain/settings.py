"""``config``: the settings of ``init_distributed`` under BMTrain's keys, and ``wait_loader``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from engine import runtime
from engine.parallel.mesh import device_mesh


class Topology:
    """Where this rank is in each kind of group: "pipe", "zero", "tp_zero", "tp".

    BMTrain's attributes give the same: ``tp_id`` is ``get_group_rank("tp")``, ``tp_idx`` is ``get_group_id("tp")``;
    likewise ``zero_id``, ``tp_zero_id``, ``stage_id`` and ``zero_idx``, ``tp_zero_idx``, ``pipe_idx``. Further ones are
    ``rank``, ``stages`` and, among the ranks of a stage, ``pp_zero_id``, ``pp_tp_zero_id`` and their ``_idx``.
    """

    def __getattr__(self, name: str) -> int:
        if name.startswith("_"):  # copy and pickle look for these, also before init_distributed
            raise AttributeError(name)
        places = _places()
        if name not in places:
            raise AttributeError(f"topology has no attribute {name!r}, expected one of {', '.join(places)}")
        return places[name]

    def get_group_id(self, group_name: str) -> int:
        """The id of this rank's group of a kind: "tp" groups are consecutive ranks, "tp_zero" groups strided ones."""
        return _places()[f"{_known(group_name)}_idx"]

    def get_group_rank(self, group_name: str) -> int:
        """This rank's position in its group of a kind."""
        return _places()["stage_id" if _known(group_name) == "pipe" else f"{group_name}_id"]


def _places() -> dict[str, int]:
    """The attributes of BMTrain's topology: ``..._id`` is this rank's position in a group, ``..._idx`` the group's."""
    rank, tp, stages = runtime.rank(), runtime.current().tp_size, runtime.current().pp_size
    stage, pipe = divmod(rank, runtime.world_size() // stages)
    return {
        "stage_id": stage,
        "pipe_idx": pipe,
        "zero_id": rank,
        "zero_idx": 0,
        "tp_id": rank % tp,
        "tp_idx": rank // tp,
        "tp_zero_id": rank // tp,
        "tp_zero_idx": rank % tp,
        "pp_zero_id": pipe,
        "pp_zero_idx": stage,
        "pp_tp_zero_id": pipe // tp,
        "pp_tp_zero_idx": stage * tp + rank % tp,
        "rank": rank,
        "stages": stages,
    }


def _known(group_name: str) -> str:
    if group_name not in ("pipe", "zero", "tp_zero", "tp"):
        raise ValueError(f"group_name is {group_name!r}, expected pipe, zero, tp_zero or tp")
    return group_name


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _group(dimension: str) -> Any:
    """The ranks that split each layer ("tp") or hold the stages ("pp"); None: this rank is alone."""
    mesh = device_mesh() if dist.is_initialized() else None
    return mesh[dimension].get_group() if mesh is not None and mesh[dimension].size() > 1 else None


def _stream() -> Any:
    return torch.cuda.current_stream() if runtime.device().type == "cuda" else None


_KEYS: dict[str, Callable[[], Any]] = {
    "initialized": runtime.is_initialized,
    "rank": runtime.rank,
    "local_rank": runtime.local_rank,
    "world_size": runtime.world_size,
    "local_size": lambda: int(os.environ.get("LOCAL_WORLD_SIZE") or runtime.world_size()),
    "zero_level": lambda: runtime.current().zero_level,
    "zero_size": lambda: runtime.world_size() // runtime.current().pp_size,
    "zero_rank": runtime.rank,
    "tp_size": lambda: runtime.current().tp_size,
    "tp_rank": lambda: Topology().get_group_rank("tp"),
    "tp_zero_size": lambda: runtime.world_size() // runtime.current().pp_size // runtime.current().tp_size,
    "tp_zero_rank": lambda: Topology().get_group_rank("tp_zero"),
    "pipe_size": lambda: runtime.current().pp_size,
    "pipe_rank": runtime.stage,
    "pipe_enabled": lambda: runtime.current().pp_size > 1,
    "micros": lambda: runtime.current().num_micro_batches or runtime.current().pp_size,
    "topology": Topology,
    "comm": _world,
    "zero_comm": _world,
    "tp_comm": lambda: _group("tp"),
    "pipe_comm": lambda: _group("pp"),
    "calc_stream": _stream,
    "load_stream": _stream,
}


class _Config(Mapping[str, Any]):
    """BMTrain's settings, read-only. ``comm`` and ``zero_comm`` are the ProcessGroup of all ranks; ``tp_comm`` and
    ``pipe_comm`` are those of the ranks that split layers and of the stages of a pipeline, or None if this rank is
    alone; the streams are the current CUDA stream, or None on a CPU."""

    def __getitem__(self, key: str) -> Any:
        return _KEYS[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)

    def __repr__(self) -> str:
        return f"config({', '.join(_KEYS)})"


config = _Config()

_last: list[Any] = []


def wait_loader() -> None:
    """Wait until the GPU has reached the previous call: when called once a step, the host stays one step ahead."""
    if runtime.device().type == "cuda":
        if _last:
            _last.pop().synchronize()
        event = torch.cuda.Event()
        event.record()
        _last.append(event)
