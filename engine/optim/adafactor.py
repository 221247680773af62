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
# Elements of a parameter that are worked on at a time: fp64 and updates then take no memory that grows with it.
_BLOCK = 1 << 22


@dataclass
class _Part:
    """One parameter in a step: this rank's part, and over which ranks its rows and its columns are cut."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]
    cut: Groups  # along any dimension
    rows: Groups  # along the last but one: a sum over rows needs these
    columns: Groups

    @property
    def shard(self) -> torch.Tensor:
        return local_tensor(self.parameter)

    def blocks(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Some rows at a time of tensors that have the rows of the shard."""
        if self.parameter.ndim < 2:
            return iter([tensors])
        rows = self.shard.shape[-2]
        height = max(1, _BLOCK * rows // max(1, self.shard.numel()))
        return zip(*(tensor.split(height, -2) for tensor in tensors), strict=True)


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) on sharded parameters.

    The second moment of a matrix is kept as the means of its rows and columns (``row_var``, ``col_var``; ``variance``
    of a vector), of the last two dimensions of what has more. These means, and the norms that scale a step, are of the
    whole parameter on any mesh: sums of a shard are added up over the ranks, in fp64, three collectives for each group
    of ranks and a step, of all parameters at once. States are placed as the dimension that they keep, and reshard.
    Without a first moment, states are a few bytes a row. Nothing here waits for a GPU.

    Args:
        params: fp32 parameters or groups of them; from a model that is already sharded. Every rank has the same ones.
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
        """One step. Collective: on all ranks the same parameters have gradients."""
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
        """As in torch; states of whole parameters are cut as this rank's are. Raises ValueError for other states."""
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
    # The updates are computed twice, for their norm and to be taken: kept, they would be a copy of the parameters.
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
    """(a block of the shard, what is taken from it but for a factor). mean: of ``row_var``; None for a vector."""
    if mean is None:
        yield part.shard, part.state["variance"].clamp(min=eps * eps).rsqrt_().mul_(part.gradient)
        return
    mean = mean.clamp(min=eps)
    for shard, gradient, rows in part.blocks(part.shard, part.gradient, part.state["row_var"]):
        estimate = (rows * part.state["col_var"]).div_(mean)
        yield shard, estimate.clamp_(min=eps * eps).rsqrt_().mul_(gradient)


def _sum_of_squares(blocks: Iterable[torch.Tensor]) -> torch.Tensor:
    """In fp64, of all of them."""
    return functools.reduce(torch.add, (block.double().square().sum() for block in blocks))


def _sums_along(part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the gradient's squares, in fp64: the sum of each row and of each column."""
    rows, columns = [], []
    for (gradient,) in part.blocks(part.gradient):
        squares = gradient.double().square()
        rows.append(squares.sum(-1, keepdim=True))
        columns.append(squares.sum(-2, keepdim=True))
    return torch.cat(rows, -2), functools.reduce(torch.add, columns)


def _added_up(sums: list[tuple[torch.Tensor, Groups]]) -> list[torch.Tensor]:
    """Each fp64 tensor, added up over its groups of ranks: one collective for each group."""
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
    """The ranks that share a parameter's parts along a dimension, or along any."""
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
    """(shape of the whole, placements) of a state: along the dimension that it sums up, it is not cut."""
    shape = list(parameter.shape)
    summed = {"row_var": parameter.ndim - 1, "col_var": parameter.ndim - 2}.get(name)
    if summed is not None:
        shape[summed] = 1
    if not is_shard(parameter):
        return tuple(shape), []
    from torch.distributed.tensor import Replicate  # imported already, as there is a shard

    return tuple(shape), [
        Replicate() if not p.is_replicate() and p.dim == summed else p  # type: ignore[attr-defined]
        for p in parameter.placements
    ]
