"""Collectives on losses, results, Python objects and errors.

All but ``first_difference``, which needs a process group, also work in one process.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from engine import runtime
from engine.torch_compat import all_gather_flat, set_timeout

Error = TypeVar("Error", bound=Exception)

_PATIENCE = 86400.0  # seconds that ranks wait for another's work, not just for its message


def sum_loss(loss: torch.Tensor) -> torch.Tensor:
    """The average of ``loss`` over all ranks (under BMTrain's name), detached and equal on all ranks. Integers are
    averaged to a float."""
    loss = loss.detach().clone()
    if not (loss.is_floating_point() or loss.is_complex()):
        loss = loss.long()
    if runtime.world_size() > 1:
        dist.all_reduce(loss)
    return loss / runtime.world_size()


def gather_result(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenate ``tensor`` (n_r, ...) of every rank along dim 0, in rank order, on every rank; n_r may differ.

    Among ranks that differ only in tp or cp, only the first contributes. A 0-d tensor counts as (1,). Raises ValueError
    on every rank if dtypes or other dimensions differ.
    """
    tensor = tensor.detach()
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    size = runtime.world_size()
    if size == 1:
        return tensor.clone()
    home = tensor.device
    tensor = tensor.to(runtime.device()).contiguous()
    # Sizes first: a mismatch inside a gloo collective would kill the process without a Python exception.
    found = gather_objects((tensor.shape[0], (tensor.dtype, *tensor.shape[1:])))
    counts, kinds = zip(*found, strict=True)
    for other, kind in enumerate(kinds):
        if kind != kinds[0]:
            theirs, first = (
                f"{dtype} with shape (n{''.join(f', {d}' for d in dims)})" for dtype, *dims in (kind, kinds[0])
            )
            raise ValueError(f"gather_result: rank {other} has {theirs}, rank 0 has {first}; they must agree")
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    out = tensor.new_empty(size * max(counts), *tensor.shape[1:])
    all_gather_flat(out, padded)
    parts = out.view(size, max(counts), *tensor.shape[1:])
    every = runtime.model_ranks()
    return torch.cat([part[:n] for part, n in zip(parts[::every], counts[::every], strict=True)]).to(home)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The ``value`` of each rank of ``group`` (None: of all ranks), sent by pickle. Collective."""
    if group is None and runtime.world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def first_difference(number: int, group: dist.ProcessGroup) -> int | None:
    """The first rank of ``group`` whose ``number`` (int64) differs from this rank's; None: all agree. Collective."""
    home = runtime.message_device(group)
    table = torch.empty(group.size(), dtype=torch.int64, device=home)
    all_gather_flat(table, torch.tensor([number], device=home), group)
    return next((rank for rank, other in enumerate(table.tolist()) if other != number), None)


def from_rank_0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's ``value``, sent to every rank by pickle. Collective."""
    box = [value]
    if runtime.world_size() > 1:
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


@contextmanager
def together(doing: str, group: dist.ProcessGroup | None = None, patient: bool = False) -> Iterator[None]:
    """If the body raises on one rank, every rank raises; the others raise an error that names that rank. Collective.

    In a collective inside the body, the others would wait for a rank that failed before it. Their error is a ValueError
    or OSError if that rank's is one, since users can fix these, else a RuntimeError.

    Args:
        doing: what the body does, for the message: "rank 1 failed while {doing}: ...".
        group: all ranks, to exchange reports over; None: the default group.
        patient: let ranks wait for each other longer than the timeout, over a group made for this, because one of them
            may upload, or work on rows that the others have in their cache. A rank that dies still ends the waiting.
    """
    error: Exception | None = None
    own = _patient_group() if patient and runtime.world_size() > 1 else None
    group = own or group
    try:
        yield
    except Exception as caught:
        error = caught
    if runtime.world_size() > 1:
        kind = next((kind for kind in (ValueError, OSError) if isinstance(error, kind)), RuntimeError)
        reports = gather_objects(None if error is None else (kind, _message(error)), group)
        if own is not None:
            dist.destroy_process_group(own)
        for rank, report in enumerate(reports):
            if report is not None and error is None:
                raise told(report[0](f"rank {rank} failed while {doing}: {report[1]}"))
    if error is not None:
        raise told(error)


def told(error: Error) -> Error:
    """Mark an error as one that all ranks have been told about, so that it is not taken for a missing rank."""
    vars(error)["_engine_told"] = True
    return error


def is_told(error: Exception) -> bool:
    """Whether an error was marked by ``told``."""
    return "_engine_told" in vars(error)


def _patient_group() -> dist.ProcessGroup:
    """A group of all ranks that meet within the usual timeout, and then wait for each other for long. Collective."""
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=runtime.last_timeout()))
    set_timeout(group, _PATIENCE)
    return group


def _message(error: Exception) -> str:
    """The text of an error for the other ranks; messages that are meant for users stay as they are."""
    return str(error) if isinstance(error, ValueError) else repr(error)
