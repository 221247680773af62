"""Statistics of parameters, gradients and recorded tensors, exact over shards and ranks, without gathering a tensor.

::

    with engine.inspect.inspect_tensor() as inspector:
        loss = model(batch)         # calls engine.inspect.record_tensor(hidden, "hidden") somewhere
        loss.backward()
    engine.print_rank(engine.inspect.format_summary(inspector.get_summary()))
    engine.print_rank(engine.inspect.format_summary(engine.inspect.inspect_model(model, "*.weight")))

Each rank reduces what it holds to five numbers per tensor; one collective gathers them, and they are merged in fp64
(Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

import fnmatch
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from engine import runtime
from engine.names import clean_name
from engine.notes import STAGE_ROLE, stages_of
from engine.shards import is_first_holder, show_own_parameters
from engine.tensors import is_shard, local_tensor
from engine.torch_compat import all_gather_flat, in_backward

_CHUNK = 1 << 22  # elements that are converted to fp64 at a time
_NONE = (0.0, 0.0, 0.0, math.inf, -math.inf)  # count, mean, sum of squared deviations, min, max

Summary = list[dict[str, Any]]


@torch.no_grad()
def inspect_model(model: nn.Module, param_name: str, prefix: str = "") -> Summary:
    """Statistics of the parameters whose name matches, and of their gradients. Collective.

    Args:
        model: plain or sharded. A parameter that is not sharded is reported as rank 0 has it.
        param_name: a pattern with ``*``, matched with ``prefix`` + the name in the model.
        prefix: put before each name.

    Returns:
        For each parameter, in the model's order: name, shape (whole), max, min, mean, std (the sample's, as
        ``torch.std``), grad_mean and grad_std (0.0 without a gradient).
    """
    show_own_parameters(model)
    held = {clean_name(name): p for name, p in model.named_parameters()}
    stages = stages_of(model)
    everything: dict[str, torch.Tensor] = dict(held)
    if stages is not None:
        everything = {name: stages.whole[name] for name in stages.parameters}
    chosen = [(prefix + n, p) for n, p in everything.items() if fnmatch.fnmatchcase(prefix + n, param_name)]
    rows = []
    for name, _ in chosen:
        own = held.get(name.removeprefix(prefix))  # None: it is on another stage of a pipeline
        if own is not None and STAGE_ROLE.get(own) == "copy":
            own = None
        for tensor in (own, None if own is None else own.grad):
            rows.append(_reduce(local_tensor(tensor)) if tensor is not None and _owned(tensor) else _count_zero())
    merged = _merge(rows, [name for name, _ in chosen])
    summary: Summary = []
    for index, (name, parameter) in enumerate(chosen):
        values, gradient = merged[2 * index], merged[2 * index + 1]
        found = {"name": name, "shape": tuple(parameter.shape), **_statistics(values)}
        found["grad_mean"], found["grad_std"] = (gradient[1], _std(gradient)) if gradient[0] else (0.0, 0.0)
        summary.append(found)
    return summary


_recorders: list[InspectTensor] = []


class InspectTensor:
    """What ``inspect_tensor`` returns: a context manager inside which ``record_tensor`` records tensors."""

    def __init__(self) -> None:
        self._records: list[tuple[str, torch.Tensor]] = []
        self._counts: dict[str, int] = {}

    def __enter__(self) -> InspectTensor:
        self._records, self._counts = [], {}
        _recorders.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _recorders.remove(self)

    def _record(self, tensor: torch.Tensor, name: str, group: str | None) -> None:
        prefix = "" if group is None else f"{group}."
        count = self._counts.get(prefix + name, 0)
        self._counts[prefix + name] = count + 1
        self._records.append((f"{prefix}{count}.{name}", tensor))

    @torch.no_grad()
    def get_summary(self) -> Summary:
        """Statistics of what was recorded, over all ranks as one tensor. Collective; call it after the ``with`` block.

        Returns:
            For each tensor, in the order of recording: name ("group.index.name"; the index counts equal names), shape
            (this rank's), max, min, mean, std, grad_mean and grad_std (None without a gradient).

        Raises:
            ValueError: ranks recorded different names; on every rank.
        """
        rows = []
        for _, tensor in self._records:
            for part in (tensor, tensor.grad if tensor.requires_grad else None):
                rows.append(_count_zero() if part is None else _reduce(local_tensor(part)))
        merged = _merge(rows, [name for name, _ in self._records])
        summary: Summary = []
        for index, (name, tensor) in enumerate(self._records):
            gradient = merged[2 * index + 1]
            found = {"name": name, "shape": tuple(tensor.shape), **_statistics(merged[2 * index])}
            found["grad_mean"], found["grad_std"] = (gradient[1], _std(gradient)) if gradient[0] else (None, None)
            summary.append(found)
        return summary


def inspect_tensor() -> InspectTensor:
    """A context manager for ``record_tensor``; call backward inside it too. Keeps what is recorded in memory.

    Gradients are those of the loss that backward was called on. ``engine.accumulate`` multiplies it by ``data_size()``,
    because the reduction of gradients averages; a loss scale is also part of it.
    """
    return InspectTensor()


def record_tensor(x: torch.Tensor, name: str, group: str | None = None) -> None:
    """Record ``x``, and later its gradient, inside ``inspect_tensor``; elsewhere do nothing.

    A forward that backward repeats (recomputation) is not recorded again.

    Raises:
        ValueError: ``x`` is a parameter; use ``inspect_model`` for these.
    """
    if isinstance(x, nn.Parameter):
        raise ValueError(f"record_tensor was given a parameter as {name!r}: use inspect_model for parameters")
    if not _recorders or in_backward():
        return
    if x.requires_grad:
        x.retain_grad()
    for recorder in _recorders:
        recorder._record(x, name, group)


def format_summary(summary: Sequence[Mapping[str, Any]]) -> str:
    """The result of ``inspect_model`` or ``get_summary`` as a table: a line per tensor, numbers to four places."""
    names = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")
    lines = [list(names)]
    for found in summary:
        lines.append([f"{found[n]:.4f}" if isinstance(found[n], float) else str(found[n]) for n in names])
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _owned(tensor: torch.Tensor) -> bool:
    """Whether this is the first of the ranks that hold the same part of ``tensor``."""
    return is_first_holder(tensor) if is_shard(tensor) else runtime.rank() == 0


def _count_zero() -> torch.Tensor:
    return torch.tensor(_NONE, dtype=torch.float64, device=runtime.device())


def _reduce(tensor: torch.Tensor) -> torch.Tensor:
    """(count, mean, sum of squared deviations, min, max) of a local tensor, on the device."""
    rows = [_count_zero()]
    for part in tensor.detach().reshape(-1).split(_CHUNK):
        if part.numel():
            values = part.to(runtime.device(), torch.float64)
            mean = values.mean()
            count = torch.full_like(mean, values.numel())
            rows.append(torch.stack([count, mean, (values - mean).square().sum(), values.min(), values.max()]))
    return _merged(torch.stack(rows))


def _merged(rows: torch.Tensor) -> torch.Tensor:
    """(parts, ..., 5) -> (..., 5): the statistics of all parts together."""
    count, mean, deviations, least, most = rows.unbind(-1)
    total = count.sum(0)
    # A part without elements has weight 0, whatever its mean; a part with nan makes the whole nan.
    whole = (torch.where(count > 0, count * mean, 0.0)).sum(0) / total.clamp(min=1)
    shifted = torch.where(count > 0, deviations + count * (mean - whole).square(), 0.0).sum(0)
    return torch.stack([total, whole, shifted, least.amin(0), most.amax(0)], -1)


def _merge(rows: list[torch.Tensor], names: Sequence[str]) -> list[list[float]]:
    """Each row, merged over the ranks. Reads the device once."""
    size = runtime.world_size()
    own = torch.stack(rows) if rows else torch.empty(0, 5, dtype=torch.float64, device=runtime.device())
    if size > 1:
        mark = torch.tensor([len(rows), zlib.crc32("\n".join(names).encode())], dtype=torch.int64, device=own.device)
        marks = mark.new_empty(size, 2)
        all_gather_flat(marks, mark)
        if other := next((r for r, found in enumerate(marks.tolist()) if found != marks[0].tolist()), None):
            raise ValueError(f"rank {other} inspects other tensors than rank 0; this rank: {list(names)}")
    if not rows:
        return []
    if size > 1:
        table = own.new_empty(size, *own.shape)
        all_gather_flat(table, own)
        own = _merged(table)
    return own.tolist()


def _statistics(row: Sequence[float]) -> dict[str, float]:
    count, mean, _, least, most = row
    if not count:
        return {"max": math.nan, "min": math.nan, "mean": math.nan, "std": math.nan}
    return {"max": most, "min": least, "mean": mean, "std": _std(row)}


def _std(row: Sequence[float]) -> float:
    return math.sqrt(row[2] / (row[0] - 1)) if row[0] > 1 else math.nan
