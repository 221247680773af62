"""``init_distributed``, which starts a rank."""

from __future__ import annotations

import datetime
import math
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from engine import runtime
from engine.parallel.mesh import build_mesh, set_timeouts
from engine.process_group import choose_device, init_process_group, launched_ranks


@dataclass(frozen=True)
class ParallelSizes:
    """The number of ranks of each kind of parallelism; see ``init_distributed``.

    Raises:
        ValueError: a size is invalid.
    """

    pp_size: int
    dp_replicate: int
    tp_size: int
    cp_size: int
    pp_chunks: int
    num_micro_batches: int | None

    def __post_init__(self) -> None:
        for name, size in {**self.ranks(), "pp_chunks": self.pp_chunks}.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}, expected a whole number of at least 1")
        if self.pp_chunks > 1 and self.pp_size == 1:
            raise ValueError(f"pp_chunks is {self.pp_chunks} but pp_size is 1: there is no pipeline to interleave")
        micro = self.num_micro_batches
        if micro is not None and (not isinstance(micro, int) or micro < 1):
            raise ValueError(f"num_micro_batches is {micro!r}, expected a whole number of at least 1")

    def ranks(self) -> dict[str, int]:
        """The sizes whose product divides the number of ranks."""
        names = ("pp_size", "dp_replicate", "tp_size", "cp_size")
        return {name: getattr(self, name) for name in names}

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if ``world_size`` ranks cannot be split like this."""
        sizes = self.ranks()
        if world_size % math.prod(sizes.values()):
            what = " * ".join(name for name, size in sizes.items() if size > 1)
            ranks = "is 1 rank" if world_size == 1 else f"are {world_size} ranks"
            raise ValueError(
                f"{what} is {math.prod(sizes.values())} but there {ranks}: it must divide them; "
                "`torchrun --nproc_per_node N` starts N"
            )


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
        seed: seeds Python, NumPy and torch. Ranks that hold different data draw different random numbers (dropout);
            rank 0 draws what a single process draws.
        zero_level: 0 to 3, the level of ``engine.shard`` if its Policy names none.
        dp_replicate: number of copies of the sharded model (hybrid sharding).
        tp_size: number of ranks that split each layer (tensor parallelism); neighbours in rank order.
        cp_size: number of ranks that split the tokens of a batch (context parallelism).
        pp_size: number of pipeline stages, each with some of the model's units (``engine.parallel.pipeline``); far
            apart in rank order. pp_size * dp_replicate * cp_size * tp_size must divide the number of ranks. Ranks that
            differ only in pp, cp or tp must be given the same batches (see ``data_rank``).
        device: "cpu", "cuda", "cuda:1" or None: this rank's GPU if there is one, else the CPU.
        timeout: seconds, or a timedelta, after which ranks that have not met, or a collective that has not completed,
            raise an error (for tensors on a GPU, torch ends the process instead). It also applies to a process group
            that exists already. None: that of the previous call, initially 600; a process group that the user made then
            keeps its own. Messages between pipeline stages over gloo keep the timeout that their groups were made with.
        num_micro_batches: number of parts into which a ``PipelineTransformerBlockList`` splits a batch; None: pp_size.
            ``engine.accumulate`` is given its microbatches and does not use it.
        pp_chunks: number of parts of the model that each stage holds. More than 1 selects the interleaved schedule,
            which waits less and sends more.
        pipe_size: BMTrain's name for pp_size; -1 means 1.

    An existing process group, from an earlier call or from ``torch.distributed``, is kept; all other settings are
    replaced.

    Raises:
        ValueError: an argument or a variable of the launcher is invalid.
        RuntimeError: the ranks did not meet within the timeout.
    """
    if zero_level not in (0, 1, 2, 3):
        raise ValueError(f"zero_level is {zero_level!r}, expected 0, 1, 2 or 3")
    sizes = ParallelSizes(
        _merged_pp_size(pp_size, pipe_size), dp_replicate, tp_size, cp_size, pp_chunks, num_micro_batches
    )
    seconds = _seconds(timeout)
    launched = launched_ranks()
    if launched is None and not init_method.startswith("env://"):
        raise ValueError(f"init_method is {init_method!r} but RANK and WORLD_SIZE are not set: set both")
    rank, world_size, local_rank = launched or (0, 1, 0)
    sizes.check_world_size(world_size)
    device = choose_device(device, local_rank)
    if launched is not None and not dist.is_initialized():
        init_process_group(init_method, rank, world_size, device, seconds)
    runtime.configure(
        runtime.Runtime(
            rank,
            world_size,
            local_rank,
            device,
            zero_level=zero_level,
            initialized=True,
            timeout=seconds,
            **asdict(sizes),
        )
    )
    if dist.is_initialized():
        build_mesh(device.type, world_size, dp_replicate, cp_size, tp_size, sizes.pp_size)
        set_timeouts(seconds, everyone=timeout is not None)
    runtime.set_seed(seed)


def _merged_pp_size(pp_size: int, pipe_size: int | None) -> int:
    """The number of stages, from the two arguments that may give it."""
    if pipe_size is None:
        return pp_size
    if pp_size not in (1, pipe_size):
        raise ValueError(
            f"pp_size is {pp_size} and pipe_size is {pipe_size}: they are the same setting, pass one of them"
        )
    return 1 if pipe_size == -1 else pipe_size


def _seconds(timeout: float | datetime.timedelta | None) -> float:
    given = runtime.last_timeout() if timeout is None else timeout
    seconds = given.total_seconds() if isinstance(given, datetime.timedelta) else given
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"timeout is {timeout!r}, expected a positive number of seconds or a timedelta")
    return seconds
