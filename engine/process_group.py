"""The process group: what a launcher says about this rank, its device, and how the ranks meet and leave.

Holds no state: the resulting settings are kept in ``engine.runtime``.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

from engine.rendezvous import launchers_store


def launched_ranks() -> tuple[int, int, int] | None:
    """(rank, world size, local rank) of the process group, or else as a launcher set them; None without either."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), _local_rank(dist.get_rank())
    present = [name for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)]
    if not present:
        return None
    if len(present) == 1:
        missing = "WORLD_SIZE" if present == ["RANK"] else "RANK"
        raise ValueError(f"{present[0]} is set in the environment but {missing} is not: a launcher sets both")
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = os.environ.get(name) or os.environ["RANK"]
        try:
            values[name] = int(text)
        except ValueError:
            raise ValueError(f"environment variable {name} is {text!r}, expected a whole number") from None
    if not 0 <= values["RANK"] < values["WORLD_SIZE"]:
        raise ValueError(f"RANK is {values['RANK']}, expected 0 to WORLD_SIZE - 1 = {values['WORLD_SIZE'] - 1}")
    return values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"]


def _local_rank(rank: int) -> int:
    """The local rank if the user made the process group: the launcher's, else the GPU that was selected, else the rank
    modulo the number of GPUs."""
    if text := os.environ.get("LOCAL_RANK"):
        return int(text)
    if torch.cuda.is_initialized() and (chosen := torch.cuda.current_device()):
        return chosen
    return rank % torch.cuda.device_count() if torch.cuda.is_available() else rank


def choose_device(device: str | torch.device | None, local_rank: int) -> torch.device:
    """The device of this rank; None: its GPU if there is one, else the CPU. Raises ValueError if it does not exist."""
    if device is None:
        # accelerate launch --cpu
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        device = "cuda" if torch.cuda.is_available() and not on_cpu else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}, expected cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device is {str(device)!r}, expected cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r} but torch sees no GPU: use device='cpu'")
    index = local_rank if device.index is None else device.index
    if index >= (there := torch.cuda.device_count()):
        if device.index is not None:
            raise ValueError(f"device is {str(device)!r} but torch sees {there} GPU(s): use one from cuda:0 on")
        raise ValueError(
            f"this rank needs GPU {index} (LOCAL_RANK) but torch sees {there}: start at most one rank per GPU; if each "
            "rank sees only its own GPU (CUDA_VISIBLE_DEVICES), set LOCAL_RANK to 0"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def init_process_group(init_method: str, rank: int, world_size: int, device: torch.device, seconds: float) -> None:
    """Meet the other ranks.

    Raises:
        ValueError: a launcher's variable is missing, or its port is none.
        RuntimeError: the ranks did not meet within ``seconds``.
    """
    where = init_method
    if init_method.startswith("env://"):
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ValueError(
                    f"environment variable {name} is not set on rank {rank} of {world_size}: start the ranks with "
                    "torchrun, or set it to the same value everywhere"
                )
        port = os.environ["MASTER_PORT"]
        if not port.isdecimal() or not 0 < int(port) < 2**16:  # torch would try to connect until the timeout
            raise ValueError(
                f"environment variable MASTER_PORT is {port!r} on rank {rank} of {world_size}, expected a port, 1 to "
                "65535; `torchrun --standalone` chooses a free one"
            )
        where = f"{os.environ['MASTER_ADDR']}:{port}"
    try:
        store = launchers_store(rank, world_size, seconds) if init_method == "env://" else None
        dist.init_process_group(
            _backend(device),
            init_method=init_method if store is None else None,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=seconds),
        )
    except (RuntimeError, ValueError, OSError) as error:  # torch raises DistError, a RuntimeError, and plain ones
        if dist.is_initialized():
            dist.destroy_process_group()
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeError(
            f"rank {rank} of {world_size} did not meet the other ranks at {where} within {seconds:g} s. Check that "
            f"all {world_size} ranks were started with this address, port and WORLD_SIZE, that rank 0 runs at that "
            f"address, and that no other job uses the port. torch said: {reason}"
        ) from error
    atexit.register(_leave)


def _backend(device: torch.device) -> str:
    # gloo beside NCCL, because checkpoints and object collectives run on CPU tensors.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _leave() -> None:
    # After an uncaught exception the other ranks may never answer, so the process ends without destroying the group.
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
        # gloo's thread may still hold Python objects of the last collective, and needs the interpreter to release them.
        # If it asks after the interpreter has begun to shut down, the process aborts.
        time.sleep(0.05)


def init_group_of_one(device: torch.device) -> None:
    """Make a process group of this process alone, without a network."""
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_leave)
