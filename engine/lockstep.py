"""Keeps a user's own loop over batches in step on all ranks, and names the rank that drops out."""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from engine import runtime
from engine.collectives import is_told, told
from engine.torch_compat import default_store

Batch = TypeVar("Batch")

_MORE, _ENDED, _FAILED = 1, 0, -1
_loops = itertools.count()
_calls: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
_LOST = re.compile(r"time[d ]*out|connection|broken pipe|peer|nccl", re.IGNORECASE)
_PATIENCE = 1.0  # seconds that ranks whose collective failed get to report it


def in_step(batches: Iterable[Batch], uneven: str = "error") -> Iterator[Batch]:
    """Yield this rank's batches for as long as every rank has one. Collective; in one process it is ``iter``.

    ::

        for batch in engine.in_step(loader):
            ...

    Each step costs one small message between CPUs, which no GPU waits for (unless the process group has only NCCL),
    and one to the process group's store, which nobody waits for. Without ``in_step``, a rank that runs out of batches
    leaves the others in a collective until the timeout.

    Args:
        uneven: what to do when some ranks run out of batches before others. "error": raise; "stop": all ranks stop,
            and the remaining batches are not used.

    Raises:
        ValueError: ranks have different numbers of batches ("error"); every rank raises, and names them.
        RuntimeError: another rank's loader raised, or another rank did not reach this step within the timeout of
            ``init_distributed`` because it raised, was killed or hangs. Names the ranks and where each was last seen.
    """
    if uneven not in ("error", "stop"):
        raise ValueError(f"uneven is {uneven!r}, expected error or stop")
    if runtime.world_size() == 1:
        yield from batches
        return
    loop = next(_loops)
    iterator = iter(batches)
    step = 0
    while True:
        failure: Exception | None = None
        have, batch = _MORE, None
        try:
            batch = next(iterator)
        except StopIteration:
            have = _ENDED
        except Exception as error:  # told to the other ranks, then raised
            have, failure = _FAILED, error
        flags = _gather_flags(have, loop, step)
        if failure is not None:
            raise failure
        _check_flags(flags, step, uneven)
        if _ENDED in flags:
            return
        yield batch  # type: ignore[misc]
        step += 1


def _check_flags(flags: list[int], step: int, uneven: str) -> None:
    """Raise, on every rank, if the batches of a rank raised, or only some ranks have ended and that is an error."""
    failed, ended, more = ([r for r, flag in enumerate(flags) if flag == kind] for kind in (_FAILED, _ENDED, _MORE))
    if failed:
        raise RuntimeError(
            f"the batches of {_ranks(failed)} raised an error at step {step}: see the error of that rank"
        )
    if ended and more and uneven == "error":
        raise ValueError(
            f"{_ranks(ended)} ended after {step} batches while {_ranks(more)} had more. Give every rank the same "
            "number (with a sampler that drops or repeats the rest), run them with engine.accumulate(empty=...), or "
            "let all stop here with in_step(uneven='stop')"
        )


def _gather_flags(have: int, loop: int, step: int) -> list[int]:
    """The flag ``have`` of every rank. Collective."""
    rank, size = runtime.rank(), runtime.world_size()
    # Written at each step, because a rank that hangs, was killed or is still on its way cannot be asked later.
    default_store().set(f"engine/in_step/{loop}/{rank}", str(step))
    mine = torch.tensor([have], dtype=torch.int64, device=runtime.message_device())
    found = [torch.empty_like(mine) for _ in range(size)]
    try:
        dist.all_gather(found, mine)
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise RuntimeError(
            f"rank {rank} waited at step {step} of its loop over batches, but not all ranks arrived: "
            f"{_last_seen(loop, step)}. {where_to_look(error)}"
        ) from error
    return [int(other.item()) for other in found]


def where_to_look(error: RuntimeError) -> str:
    """A hint for the message about a missing rank. error: what torch raised for it."""
    return (
        "The output of a rank shows whether it raised an error or was killed; `py-spy dump` shows where it hangs. "
        f"torch said: {str(error).strip().splitlines()[0]}"
    )


def _last_seen(loop: int, step: int) -> str:
    store = default_store()
    behind = []
    try:
        for rank in range(runtime.world_size()):
            key = f"engine/in_step/{loop}/{rank}"
            last = int(store.get(key)) if store.check([key]) else -1
            if last < step:
                behind.append(f"rank {rank} was last at step {last}" if last >= 0 else f"rank {rank} never began")
    except RuntimeError:
        return "the store with their positions is gone, so the process that holds it (rank 0 or torchrun) has ended"
    return ", ".join(behind) or "all had arrived, so one has just ended or lost its connection"


def _ranks(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {text}"


@contextmanager
def watched(what: str) -> Iterator[None]:
    """If a collective inside does not complete, name the ranks that are not waiting in it. Costs nothing otherwise.

    Args:
        what: the function that makes the collectives, by the name that its caller knows.

    Raises:
        RuntimeError: a collective timed out or lost a rank; torch's own error is its cause.
    """
    number = next(_calls[what])
    try:
        yield
    except RuntimeError as error:
        if runtime.world_size() == 1 or is_told(error) or not _LOST.search(str(error)):
            raise
        lost = RuntimeError(
            f"rank {runtime.rank()} was in {what}, and one of its collectives did not complete: "
            f"{_not_waiting(what, number)}. {where_to_look(error)}"
        )
        raise told(lost) from error


def _not_waiting(what: str, number: int) -> str:
    store = default_store()
    keys = {rank: f"engine/waits in {what}/{number}/{rank}" for rank in range(runtime.world_size())}
    try:
        store.set(keys[runtime.rank()], "")
        deadline = time.monotonic() + _PATIENCE
        while away := [rank for rank, key in keys.items() if not store.check([key])]:
            if time.monotonic() > deadline:
                return f"{_ranks(away)} did not report the same within {_PATIENCE:g} s"
            time.sleep(0.05)
    except RuntimeError:
        return "the store of waiting ranks is gone, so the process that holds it (rank 0 or torchrun) has ended"
    return "all ranks waited in it, so they called different collectives, or the network between them failed"
