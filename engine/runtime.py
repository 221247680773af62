"""Ranks, devices, seeds and the process group.

One process is the default: without a launcher's variables nothing distributed starts and every collective below is
the identity. ``torchrun`` and ``accelerate launch`` set the variables and are told apart from nothing else.
"""

from __future__ import annotations

import atexit
import datetime
import math
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from engine.rendezvous import launchers_store

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT = 600.0  # seconds


@dataclass
class Runtime:
    """What ``init_distributed`` decided. Without it: one process, on whatever device the model is."""

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
    draws: int = 0  # calls of init_parameters since the seed was set


_runtime = Runtime()


def current() -> Runtime:
    """The settings in force. Raises ValueError where there are several ranks and nobody called init_distributed."""
    if not _runtime.initialized:
        rank_, world_size_, _ = _ranks() or (0, 1, 0)
        if world_size_ > 1:
            raise ValueError(f"this is rank {rank_} of {world_size_}: call engine.init_distributed() first")
    return _runtime


def init_distributed(
    init_method: str = "env://",
    seed: int = 0,
    zero_level: int = 3,
    dp_replicate: int = 1,
    tp_size: int = 1,
    cp_size: int = 1,
    device: str | torch.device | None = None,
    timeout: float | datetime.timedelta | None = None,
    pp_size: int = 1,
    num_micro_batches: int | None = None,
    pp_chunks: int = 1,
    pipe_size: int | None = None,
) -> None:
    """Start this rank: process group (under a launcher), device mesh, device, seeds.

    Args:
        init_method: how the ranks meet: "env://" (MASTER_ADDR, MASTER_PORT), "tcp://host:port" or "file:///path".
        seed: of Python, numpy and torch. Ranks that hold different data draw different numbers (dropout); rank 0
            draws what one process draws.
        zero_level: 0 to 3, the level of ``engine.shard`` where a Policy names none.
        dp_replicate: number of copies of the sharded model (hybrid sharding).
        tp_size: ranks that split each layer (tensor parallelism); neighbours in rank order.
        cp_size: ranks that split the tokens of a batch (context parallelism).
        pp_size: stages of a pipeline, each of which has a part of the model's units (``engine.parallel.pipeline``); far
            apart in rank order. pp_size * dp_replicate * cp_size * tp_size divides the number of ranks; ranks that
            differ in pp, cp or tp only are given the same batches (see ``data_rank``).
        device: "cpu", "cuda", "cuda:1" or None: this rank's GPU if there is one, else the CPU.
        timeout: seconds (or timedelta) until ranks that do not meet, or a collective that does not end, raise; also of
            a process group that is there already. None: that of an earlier call, at first 600; a process group that
            its user made keeps its own. What stages of a pipeline send each other over gloo waits as long as was said
            when their groups were made.
        num_micro_batches: parts into which a ``PipelineTransformerBlockList`` cuts a batch; None: pp_size.
            ``engine.accumulate`` is given microbatches, and needs no number.
        pp_chunks: parts of the model that each stage has: 1, or more for the interleaved schedule, which waits less and
            sends more.
        pipe_size: BMTrain's name of pp_size; -1 is 1.

    A process group that is there already, from an earlier call or by ``torch.distributed``, is kept; the other
    settings are replaced.

    Raises:
        ValueError: an argument or a launcher's variable is wrong.
        RuntimeError: the ranks did not meet within the timeout.
    """
    given = _runtime.timeout if timeout is None else timeout
    seconds = given.total_seconds() if isinstance(given, datetime.timedelta) else given
    if zero_level not in (0, 1, 2, 3):
        raise ValueError(f"zero_level is {zero_level!r}, expected 0, 1, 2 or 3")
    if pipe_size is not None:
        if pp_size not in (1, pipe_size):
            raise ValueError(
                f"pp_size is {pp_size} and pipe_size is {pipe_size}: they are one setting, pass one of them"
            )
        pp_size = 1 if pipe_size == -1 else pipe_size
    sizes = {"pp_size": pp_size, "dp_replicate": dp_replicate, "tp_size": tp_size, "cp_size": cp_size}
    for name, size in {**sizes, "pp_chunks": pp_chunks}.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}, expected a whole number of at least 1")
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"timeout is {timeout!r}, expected a positive number of seconds or a timedelta")
    if pp_chunks > 1 and pp_size == 1:
        raise ValueError(f"pp_chunks is {pp_chunks} but pp_size is 1: there is no pipeline to interleave")
    if num_micro_batches is not None and (not isinstance(num_micro_batches, int) or num_micro_batches < 1):
        raise ValueError(f"num_micro_batches is {num_micro_batches!r}, expected a whole number of at least 1")
    launched = _ranks()
    if launched is None and not init_method.startswith("env://"):
        raise ValueError(f"init_method is {init_method!r} but RANK and WORLD_SIZE are not set: set both")
    rank_, world_size_, local_rank_ = launched or (0, 1, 0)
    if world_size_ % math.prod(sizes.values()):
        what = " * ".join(name for name, size in sizes.items() if size > 1)
        ranks = "is 1 rank" if world_size_ == 1 else f"are {world_size_} ranks"
        raise ValueError(
            f"{what} is {math.prod(sizes.values())} but there {ranks}: it must divide them; "
            "`torchrun --nproc_per_node N` starts N"
        )
    device_ = _choose_device(device, local_rank_)
    if launched is not None and not dist.is_initialized():
        _meet(init_method, rank_, world_size_, device_, seconds)
    _runtime.rank, _runtime.world_size, _runtime.local_rank = rank_, world_size_, local_rank_
    _runtime.device, _runtime.zero_level, _runtime.dp_replicate = device_, zero_level, dp_replicate
    _runtime.cp_size, _runtime.tp_size, _runtime.pp_size = cp_size, tp_size, pp_size
    _runtime.pp_chunks, _runtime.num_micro_batches = pp_chunks, num_micro_batches
    _runtime.timeout, _runtime.initialized = seconds, True
    if dist.is_initialized():
        from engine.parallel.mesh import build_mesh, limit_waiting

        build_mesh(device_.type, world_size_, dp_replicate, cp_size, tp_size, pp_size)
        limit_waiting(seconds, everyone=timeout is not None)
    set_seed(seed)


def _ranks() -> tuple[int, int, int] | None:
    """(rank, world size, local rank) of a process group that is there, or as a launcher set them; None without both."""
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


def _local_rank(rank_: int) -> int:
    """That of a process whose group its user made: as a launcher set it, else the GPU it has chosen, or the next."""
    if text := os.environ.get("LOCAL_RANK"):
        return int(text)
    if torch.cuda.is_initialized() and (chosen := torch.cuda.current_device()):
        return chosen
    return rank_ % torch.cuda.device_count() if torch.cuda.is_available() else rank_


def _choose_device(device: str | torch.device | None, local_rank_: int) -> torch.device:
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
    index = local_rank_ if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"this rank needs GPU {index} (LOCAL_RANK) but the machine has {torch.cuda.device_count()}: "
            "start at most one rank per GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _meet(init_method: str, rank_: int, world_size_: int, device_: torch.device, seconds: float) -> None:
    where = init_method
    if init_method.startswith("env://"):
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ValueError(
                    f"environment variable {name} is not set on rank {rank_} of {world_size_}: start the ranks with "
                    "torchrun, or set it to the same value everywhere"
                )
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = launchers_store(rank_, world_size_, seconds) if init_method == "env://" else None
        dist.init_process_group(
            _backend(device_),
            init_method=init_method if store is None else None,
            store=store,
            rank=rank_,
            world_size=world_size_,
            timeout=datetime.timedelta(seconds=seconds),
        )
    except (RuntimeError, ValueError, OSError) as error:  # torch raises DistError, a RuntimeError, and plain ones
        if dist.is_initialized():
            dist.destroy_process_group()
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeError(
            f"rank {rank_} of {world_size_} did not meet the other ranks at {where} within {seconds:g} s. Check that "
            f"all {world_size_} ranks were started with this address, port and WORLD_SIZE, that rank 0 runs at that "
            f"address, and that no other job uses the port. torch said: {reason}"
        ) from error
    atexit.register(_leave)


def _backend(device_: torch.device) -> str:
    # gloo beside NCCL, because checkpoints and object collectives run on CPU tensors.
    return "cpu:gloo,cuda:nccl" if device_.type == "cuda" else "gloo"


def message_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where numbers travel that the host reads: the CPU where the group has gloo, so that no GPU is waited for."""
    return torch.device("cpu") if "gloo" in str(dist.get_backend_config(group)) else device()


def _leave() -> None:
    # After an uncaught exception the other ranks may never answer, so the group is left to the end of the process.
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
        # gloo's thread may still hold the Python objects of the last collective, and needs the interpreter once more
        # to let go of them: asking for it after the interpreter began to end would abort the process.
        time.sleep(0.05)


def ensure_group() -> None:
    """A process group of one where none is: sharding at 16-bit precision needs one, and needs no network for it."""
    if not dist.is_initialized():
        runtime = current()
        device_ = runtime.device or _choose_device(None, 0)
        dist.init_process_group(_backend(device_), store=dist.HashStore(), rank=0, world_size=1)
        runtime.device = device_
        atexit.register(_leave)


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
    """Number of ranks of one stage that compute one batch together, neighbours in rank order: tp_size * cp_size."""
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


def set_seed(seed: int) -> None:
    """Seed Python, numpy and torch. Ranks with other data or layers get other streams; rank 0 gets ``seed`` itself."""
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}, expected a whole number of at least 0")
    runtime = current()
    runtime.seed, runtime.draws = seed, 0
    stream = stage() * data_size() + data_rank()
    own = (seed + stream * 0x9E3779B97F4A7C15) % 2**63  # 2^64 / golden ratio: far apart for nearby ranks
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


def synchronize() -> None:
    """Wait until every rank, and this rank's GPU, has come here."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    if world_size() > 1:
        dist.barrier()


def print_rank(*values: Any, rank: int = 0, **kwargs: Any) -> None:
    """``print`` on one rank only."""
    if _this_rank() == rank:
        print(*values, **kwargs)


def sum_loss(loss: torch.Tensor) -> torch.Tensor:
    """The average of ``loss`` over all ranks (BMTrain's name for it), detached, equal on all ranks."""
    loss = loss.detach().clone()
    if world_size() > 1:
        dist.all_reduce(loss)
        loss /= world_size()
    return loss


def gather_result(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenate ``tensor`` (n_r, ...) of every rank along dim 0, in rank order, on every rank; n_r may differ.

    Of ranks that differ in tp or cp only, the first one's counts. A 0-d tensor counts as (1,). Raises ValueError on
    every rank when dtypes or other dimensions differ.
    """
    from engine.torch_compat import all_gather_flat

    tensor = tensor.detach()
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    size = world_size()
    if size == 1:
        return tensor.clone()
    home = tensor.device
    tensor = tensor.to(device()).contiguous()
    dtypes = sorted({str(v) for v in vars(torch).values() if isinstance(v, torch.dtype)})
    mine = [dtypes.index(str(tensor.dtype)), tensor.ndim, *tensor.shape]
    if len(mine) > 10:
        raise ValueError(f"gather_result takes at most 8 dimensions, got {tensor.ndim}")
    # Sizes first: a mismatch inside a gloo collective would kill the process without a Python exception.
    row = torch.tensor(mine + [0] * (10 - len(mine)), dtype=torch.int64, device=tensor.device)
    table = torch.empty(size, 10, dtype=torch.int64, device=tensor.device)
    all_gather_flat(table.view(-1), row)
    rows = table.tolist()
    for other, found in enumerate(rows):
        if found[:2] != rows[0][:2] or found[3:] != rows[0][3:]:
            theirs, first = (
                f"{dtypes[r[0]]} with shape (n{''.join(f', {d}' for d in r[3 : 2 + r[1]])})" for r in (found, rows[0])
            )
            raise ValueError(f"gather_result: rank {other} has {theirs}, rank 0 has {first}; they must agree")
    counts = [found[2] for found in rows]
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    out = tensor.new_empty(size * max(counts), *tensor.shape[1:])
    wire = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
    if padded.numel():
        all_gather_flat(out.view(wire).view(-1), padded.view(wire).view(-1))
    parts = out.view(size, max(counts), *tensor.shape[1:])
    every = model_ranks()
    return torch.cat([part[:n] for part, n in zip(parts[::every], counts[::every], strict=True)]).to(home)


def mesh() -> DeviceMesh:
    """The device mesh of five named dimensions, outermost first: pp, dp_replicate, dp_shard, cp, tp."""
    from engine.parallel.mesh import build_mesh

    ensure_group()
    settings = current()
    sizes = settings.dp_replicate, settings.cp_size, settings.tp_size, settings.pp_size
    return build_mesh(device().type, world_size(), *sizes)
