"""Adafactor on sharded parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engine.optim.states import check_gradients, check_group, check_states, is_number, placed_gradient, undone_on_error
from engine.tensors import as_shard, cut_dims, is_shard, local_box, local_tensor, shard_of

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

Groups = list[dist.ProcessGroup]
# Elements of a parameter that are processed at a time, to bound the memory of fp64 copies and updates.
_BLOCK = 1 << 22


@dataclass
class _Part:
    """One parameter in a step: this rank's part, and the groups of ranks over which it is cut."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]
    cut: Groups  # along any dimension
    rows: Groups  # along the last dimension but one: sums over rows are reduced over these
    columns: Groups  # along the last dimension

    @property
    def shard(self) -> torch.Tensor:
        return local_tensor(self.parameter)

    def blocks(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Split tensors with the rows of the shard into blocks of rows."""
        if self.parameter.ndim < 2:
            return iter([tensors])
        rows = self.shard.shape[-2]
        height = max(1, _BLOCK * rows // max(1, self.shard.numel()))
        return zip(*(tensor.split(height, -2) for tensor in tensors), strict=True)


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) on sharded parameters.

    The second moment of a matrix is kept as the means of its rows and columns (``row_var``, ``col_var``; of a vector as
    ``variance``); with more than two dimensions, matrices are the last two. These means, and the norms that scale a
    step, are those of the whole parameter on any mesh: the sums of shards are reduced over the ranks in fp64, by three
    collectives per step and group of ranks for all parameters together. States are placed as the dimension that they
    keep, and reshard. There is no first moment, so states take a few bytes per row. A step does not wait for a GPU.

    Args:
        params: fp32 parameters or groups of them, of a model that is already sharded; the same on every rank.
        lr, beta2_decay, eps, d, weight_decay, maximize: as in torch.optim.Adafactor; weight decay is decoupled.

    Raises:
        ValueError: a value is out of its range, or a parameter is not fp32 or is on meta.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "maximize": maximize})

    @undone_on_error
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; checks the group's values and parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group(group, flags=("maximize",))
        if not (is_number(group["beta2_decay"]) and group["beta2_decay"] <= 0):
            raise ValueError(f"beta2_decay is {group['beta2_decay']!r}, expected at most 0")
        if not (is_number(group["d"]) and group["d"] >= 1):
            raise ValueError(f"d is {group['d']!r}, expected at least 1")
        eps = group["eps"]
        two = isinstance(eps, tuple | list) and len(eps) == 2
        if not (two and all(is_number(x) and x >= 0 for x in (eps[1:] if eps[0] is None else eps))):
            raise ValueError(f"eps is {eps!r}, expected two numbers of at least 0, or None for the first")
        for parameter in group["params"]:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}, expected torch.float32: "
                    "small updates would be lost; give it to an AdamOptimizer, which keeps masters"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """One step. Collective: the same parameters must have gradients on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_gradients(self.param_groups)
        for group in self.param_groups:
            parts = [self._part(p) for p in group["params"] if p.grad is not None]
            if parts:
                _step(parts, group)
        return loss

    def _part(self, parameter: torch.Tensor) -> _Part:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in _names(parameter):
                shape, placements = _kept(parameter, name)
                size = shape
                if is_shard(parameter):
                    size, _ = local_box(shape, parameter.device_mesh, placements)
                zeros = torch.zeros(size, dtype=torch.float32, device=parameter.device)
                if is_shard(parameter):
                    zeros = as_shard(zeros, shape, parameter.device_mesh, placements)
                state[name] = zeros
        return _Part(
            parameter,
            local_tensor(placed_gradient(parameter)),
            {name: local_tensor(value) for name, value in state.items()},
            _cut(parameter, None),
            _cut(parameter, parameter.ndim - 2),
            _cut(parameter, parameter.ndim - 1),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; whole states are cut to this rank's shards. Raises ValueError for states that do not fit."""
        check_states(self, state_dict, lambda p: {name: _kept(p, name)[0] for name in _names(p)})
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                for name in _names(parameter):
                    if name in state and is_shard(parameter):
                        shape, placements = _kept(parameter, name)
                        value = state[name]
                        if is_shard(value) and tuple(value.placements) == tuple(placements):
                            continue
                        whole = value.full_tensor() if is_shard(value) else value
                        state[name] = shard_of(whole.view(shape), parameter.device_mesh, placements)
                if "step" in state:
                    state["step"] = state["step"].to(parameter.device, torch.float32)


def _step(parts: list[_Part], group: dict[str, Any]) -> None:
    lr, eps1, eps2 = group["lr"], group["eps"][0], group["eps"][1]
    eps1 = torch.finfo(torch.float32).eps if eps1 is None else eps1
    sums: list[tuple[torch.Tensor, Groups]] = []
    for part in parts:
        part.state["step"] += 1
        sums.append((_sum_of_squares(x for (x,) in part.blocks(part.shard)), part.cut))
        if part.parameter.ndim > 1:
            rows, columns = _sums_along(part)
            sums += [(rows, part.columns), (columns, part.rows)]
    found = iter(_added_up(sums))
    sizes, row_sums = [], []
    for part in parts:
        sizes.append((next(found) / part.parameter.numel()).sqrt())
        weight = part.state["step"].double().pow(group["beta2_decay"]).float()
        if part.parameter.ndim > 1:
            for name, dim in (("row_var", -1), ("col_var", -2)):
                part.state[name].lerp_((next(found) / part.parameter.shape[dim]).float(), weight)
            row_sums.append((part.state["row_var"].double().sum(-2, keepdim=True), part.rows))
        else:
            part.state["variance"].lerp_(part.gradient.square(), weight)
    found = iter(_added_up(row_sums))
    means = [(next(found) / p.parameter.shape[-2]).float() if p.parameter.ndim > 1 else None for p in parts]
    # Updates are computed twice, for their norm and for the step: keeping them would take a copy of the parameters.
    norms = [
        (_sum_of_squares(update for _, update in _updates(part, mean, eps1)), part.cut)
        for part, mean in zip(parts, means, strict=True)
    ]
    for part, mean, size, square in zip(parts, means, sizes, _added_up(norms), strict=True):
        rate = part.state["step"].double().rsqrt().clamp(max=lr) * size.clamp(min=eps2)
        below = (square.sqrt() / (math.sqrt(part.parameter.numel()) * group["d"])).clamp(min=1.0)
        factor = (rate / below).float()
        if group["weight_decay"] != 0:
            part.shard.mul_(1 - lr * group["weight_decay"])
        for shard, update in _updates(part, mean, eps1):
            shard.sub_(update.mul_(-factor if group["maximize"] else factor))


def _updates(part: _Part, mean: torch.Tensor | None, eps: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(a block of the shard, its update without the step's factor). mean: that of ``row_var``; None for a vector."""
    if mean is None:
        yield part.shard, part.state["variance"].clamp(min=eps * eps).rsqrt_().mul_(part.gradient)
        return
    mean = mean.clamp(min=eps)
    for shard, gradient, rows in part.blocks(part.shard, part.gradient, part.state["row_var"]):
        estimate = (rows * part.state["col_var"]).div_(mean)
        yield shard, estimate.clamp_(min=eps * eps).rsqrt_().mul_(gradient)


def _sum_of_squares(blocks: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of squares over all blocks, in fp64."""
    return functools.reduce(torch.add, (block.double().square().sum() for block in blocks))


def _sums_along(part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of the squared gradient over each row and over each column, in fp64."""
    rows, columns = [], []
    for (gradient,) in part.blocks(part.gradient):
        squares = gradient.double().square()
        rows.append(squares.sum(-1, keepdim=True))
        columns.append(squares.sum(-2, keepdim=True))
    return torch.cat(rows, -2), functools.reduce(torch.add, columns)


def _added_up(sums: list[tuple[torch.Tensor, Groups]]) -> list[torch.Tensor]:
    """Each fp64 tensor summed over its groups of ranks, with one collective per group."""
    values = [value for value, _ in sums]
    groups = {id(group): group for _, needed in sums for group in needed}
    for key, group in groups.items():
        members = [i for i, (_, needed) in enumerate(sums) if any(id(one) == key for one in needed)]
        flat = torch.cat([values[i].reshape(-1) for i in members])
        dist.all_reduce(flat, group=group)
        for i, part in zip(members, flat.split([values[i].numel() for i in members]), strict=True):
            values[i] = part.view(values[i].shape)
    return values


def _cut(parameter: torch.Tensor, dim: int | None) -> Groups:
    """The groups of ranks over which a parameter is cut along a dimension; None: along any."""
    if not is_shard(parameter):
        return []
    return [
        parameter.device_mesh.get_group(i)
        for i in cut_dims(parameter)
        if dim is None or parameter.placements[i].dim == dim  # type: ignore[attr-defined]
    ]


def _names(parameter: torch.Tensor) -> tuple[str, ...]:
    return ("row_var", "col_var") if parameter.ndim > 1 else ("variance",)


def _kept(parameter: torch.Tensor, name: str) -> tuple[tuple[int, ...], list[Placement]]:
    """(shape of the whole, placements) of a state. It is not cut along the dimension over which it is a mean."""
    shape = list(parameter.shape)
    summed = {"row_var": parameter.ndim - 1, "col_var": parameter.ndim - 2}.get(name)
    if summed is not None:
        shape[summed] = 1
    if not is_shard(parameter):
        return tuple(shape), []
    from torch.distributed.tensor import Replicate  # imported already, since there is a shard

    return tuple(shape), [
        Replicate() if not p.is_replicate() and p.dim == summed else p  # type: ignore[attr-defined]
        for p in parameter.placements
    ]
