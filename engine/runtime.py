"""This rank: its number, device and seed, and the sizes of each kind of parallelism.

``init_distributed`` (``engine.startup``) sets these. One process is the default: without a launcher's variables nothing
distributed starts.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.process_group import choose_device, init_group_of_one, launched_ranks

DEFAULT_TIMEOUT = 600.0  # seconds


@dataclass
class Runtime:
    """The settings of ``init_distributed``; the defaults are one process, on whatever device the model is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device | None = None
    seed: int = 0
    zero_level: int = 3
    dp_replicate: int = 1
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pp_chunks: int = 1
    num_micro_batches: int | None = None
    initialized: bool = False
    timeout: float = DEFAULT_TIMEOUT  # seconds
    draws: int = 0  # calls of BMTrain's init_parameters since the seed was set


_runtime = Runtime()


def current() -> Runtime:
    """The current settings. Raises ValueError on several ranks if init_distributed was not called."""
    if not _runtime.initialized:
        rank_, world_size_, _ = launched_ranks() or (0, 1, 0)
        if world_size_ > 1:
            raise ValueError(f"this is rank {rank_} of {world_size_}: call engine.init_distributed() first")
    return _runtime


def configure(settings: Runtime) -> Runtime:
    """Replace the current settings. Returns the old ones."""
    global _runtime
    before, _runtime = _runtime, settings
    return before


def last_timeout() -> float:
    """The current timeout in seconds, even before init_distributed is called."""
    return _runtime.timeout


def ensure_group() -> None:
    """Make a process group of one if there is none: a device mesh needs one."""
    if not dist.is_initialized():
        settings = current()
        device_ = settings.device or choose_device(None, 0)
        init_group_of_one(device_)
        settings.device = device_


def is_initialized() -> bool:
    """Whether ``init_distributed`` was called."""
    return _runtime.initialized


def rank() -> int:
    """Index of this process among all; 0 where there is one."""
    return dist.get_rank() if dist.is_initialized() else current().rank


_this_rank = rank  # print_rank takes an argument of that name


def world_size() -> int:
    """Number of processes; 1 without a launcher."""
    return dist.get_world_size() if dist.is_initialized() else current().world_size


def model_ranks() -> int:
    """Number of neighbouring ranks of a stage that compute one batch together: tp_size * cp_size."""
    return current().tp_size * current().cp_size


def stage() -> int:
    """Index of this rank's stage in its pipeline; 0 without one."""
    return rank() // (world_size() // current().pp_size)


def stages() -> int:
    """Number of stages of a pipeline; 1 without one."""
    return _runtime.pp_size


def data_rank() -> int:
    """Index of this rank's part of the data, 0 to ``data_size() - 1``; what samplers split by."""
    return rank() % (world_size() // current().pp_size) // model_ranks()


def data_size() -> int:
    """Number of parts that the data is split into: the ranks, over tp_size * cp_size * pp_size."""
    return world_size() // (model_ranks() * current().pp_size)


def local_rank() -> int:
    """Index of this process on its machine."""
    return current().local_rank


def device() -> torch.device:
    """The device of this rank; the CPU before ``init_distributed``."""
    return _runtime.device or torch.device("cpu")


def message_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device for messages that the host reads: the CPU if the group has gloo, so that the host waits for no GPU."""
    return torch.device("cpu") if "gloo" in str(dist.get_backend_config(group)) else device()


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch. Ranks with different data or layers get different streams; rank 0 gets ``seed``."""
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}, expected a whole number of at least 0")
    settings = current()
    settings.seed, settings.draws = seed, 0
    seed_generators(seed)


def seed_generators(seed: int) -> None:
    """Seed the generators as ``set_seed`` does, without changing the settings."""
    stream = stage() * data_size() + data_rank()
    own = (seed + stream * 0x9E3779B97F4A7C15) % 2**63  # 2^64 / golden ratio: far apart for nearby ranks
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


def synchronize() -> None:
    """Wait until every rank has reached this call, and this rank's GPU has finished its work."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    if world_size() > 1:
        dist.barrier()


def print_rank(*values: Any, rank: int = 0, **kwargs: Any) -> None:
    """``print`` on one rank only."""
    if _this_rank() == rank:
        print(*values, **kwargs)


def warn(message: str, stacklevel: int = 1) -> None:
    """``warnings.warn`` about what concerns all ranks of a pipeline stage, by the first of them only."""
    if rank() % (world_size() // stages()) == 0:
        warnings.warn(message, stacklevel=stacklevel + 1)
