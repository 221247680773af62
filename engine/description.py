"""``engine.describe``: units, placements, memory and communication of a model, computed and not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engine import runtime
from engine.memory import readable
from engine.names import clean_name
from engine.notes import STAYS_GATHERED, policy_of, stages_of, zero_level
from engine.parallel.gloo.sharded_embedding import is_sharded_embedding
from engine.parallel.over_ranks import mixed_precision
from engine.parallel.units import unit_parameters
from engine.shards import show_own_parameters
from engine.tensors import is_shard, local_tensor


@dataclass
class Unit:
    """Parameters that are gathered together.

    Attributes:
        tensors, elements, trainable: numbers of parameters, of their elements, and of those that are trained.
        on_rank, gradients_on_rank, optimizer_on_rank: bytes that this rank holds.
        gathered: bytes that a rank receives when it gathers the unit once.
        reduced: bytes that a rank sends when it reduces the unit's gradients to shards once.
        copied: bytes that a rank sends when it then averages its shard with the other copies of the model.
    """

    name: str
    tensors: int = 0
    elements: int = 0
    trainable: int = 0
    on_rank: int = 0
    gradients_on_rank: int = 0
    optimizer_on_rank: int = 0
    gathered: int = 0
    reduced: int = 0
    copied: int = 0
    dtypes: set[str] = field(default_factory=set)
    placements: set[str] = field(default_factory=set)


@dataclass
class Description:
    """What ``describe`` returns; its ``str`` is the table that ``describe`` prints.

    Attributes:
        gathers: {unit: how often it is gathered in a step of one microbatch}.
        all_gather, reduce_scatter, all_reduce: bytes a rank receives or sends in a step of one microbatch.
    """

    title: str
    units: list[Unit]
    gathers: dict[str, int]

    @property
    def all_gather(self) -> int:
        return sum(unit.gathered * self.gathers[unit.name] for unit in self.units)

    @property
    def reduce_scatter(self) -> int:
        return sum(unit.reduced for unit in self.units)

    @property
    def all_reduce(self) -> int:
        return sum(unit.copied for unit in self.units)

    def __str__(self) -> str:
        rows = [("unit", "tensors", "parameters", "trainable", "on this rank", "gathers", "dtype", "placement")]
        for u in self.units:
            placement = ", ".join(sorted(u.placements))
            cells = (
                f"{u.tensors}",
                f"{u.elements:,}",
                f"{u.trainable:,}",
                readable(u.on_rank),
                f"{self.gathers[u.name]}",
            )
            rows.append((u.name, *cells, ", ".join(sorted(u.dtypes)), placement))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        align = (str.ljust, *[str.rjust] * 5, str.ljust, str.ljust)
        table = ["  ".join(a(c, w) for a, c, w in zip(align, row, widths, strict=True)) for row in rows]
        parameters = sum(u.on_rank for u in self.units)
        gradients = sum(u.gradients_on_rank for u in self.units)
        optimizer = sum(u.optimizer_on_rank for u in self.units)
        return "\n".join(
            [
                self.title,
                *(line.rstrip() for line in table),
                f"this rank keeps {readable(parameters)} of parameters, {readable(gradients)} of gradients after "
                f"backward, {readable(optimizer)} of AdamOptimizer's state",
                f"a step of one microbatch: all-gather {readable(self.all_gather)}, reduce-scatter "
                f"{readable(self.reduce_scatter)}, all-reduce {readable(self.all_reduce)} in and out of each rank",
            ]
        )


def describe(model: nn.Module, show: bool = True) -> Description:
    """Units, placements, bytes per rank and communication per step of a model: sharded or plain, also on meta.

    Not collective. Bytes are this rank's, and include the padding of shards to equal sizes when they travel.

    Args:
        show: print it, on rank 0.
    """
    show_own_parameters(model)
    policy, level = policy_of(model), zero_level(model)
    whole = not isinstance(model, FSDPModule)
    found = []
    sharded: set[nn.Module] = {m for m in model.modules() if isinstance(m, FSDPModule)}
    names = {module: clean_name(name) for name, module in model.named_modules()}
    mixed = None if policy is None else mixed_precision(policy, model)
    compute, wire = (None, None) if mixed is None else (mixed.param_dtype, mixed.reduce_dtype)
    seen: set[int] = set()
    looked_up = {module.weight for module in model.modules() if is_sharded_embedding(module)}
    for module, members in unit_parameters(model, sharded).items():
        unit = Unit(names[module] or "(root)")
        for _, parameter in members:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                _add(unit, parameter, compute, wire, parameter in looked_up)
        if unit.tensors:
            found.append(unit)
    # Level 3 frees units after forward, except the root and the last unit, which backward needs first.
    staying = {"(root)", *(names[module] for module in sharded if STAYS_GATHERED.get(module))}
    gathers = {unit.name: 0 if whole else 2 if level == 3 and unit.name not in staying else 1 for unit in found}
    total = sum(unit.elements for unit in found)
    description = Description(_title(model, "not sharded" if whole else f"ZeRO level {level}", total), found, gathers)
    if show:
        runtime.print_rank(description)
    return description


def _title(model: nn.Module, how: str, total: int) -> str:
    """The model's class, its parameters, of which this rank's units have ``total``, and its policy in one line."""
    if (policy := policy_of(model)) is not None:
        how += f", precision {policy.precision}, recompute {policy.recompute}, offload {policy.offload}"
        how += f", compile {policy.compile}"
    if (stages := stages_of(model)) is not None:
        how += f", stage {stages.rank} of {stages.size} with {total:,} of them"
        total = sum(stages.whole[name].numel() for name in stages.parameters)
    ranks = runtime.world_size()
    kind = type(model).__name__.removeprefix("FSDP")
    return f"{kind}: {total:,} parameters on {ranks} rank{'s' * (ranks > 1)}, {how}"


def _add(
    unit: Unit, parameter: torch.Tensor, compute: torch.dtype | None, wire: torch.dtype | None, looked_up: bool
) -> None:
    """Add a parameter to its unit.

    Args:
        compute, wire: the dtypes in which parameters are gathered and gradients are reduced; None: the parameter's.
        looked_up: only the rows that a batch reads are sent.
    """
    local = local_tensor(parameter)
    width = parameter.element_size()
    unit.tensors += 1
    unit.elements += parameter.numel()
    unit.on_rank += local.numel() * width
    unit.dtypes.add(str(parameter.dtype).removeprefix("torch."))
    if parameter.requires_grad:
        unit.trainable += parameter.numel()
        unit.gradients_on_rank += local.numel() * width
        unit.optimizer_on_rank += local.numel() * (8 if parameter.dtype == torch.float32 else 12)
    if not is_shard(parameter):
        unit.placements.add("whole")
        return
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim {i}" for i in range(mesh.ndim))
    text = [f"{names[d]} {mesh.size(d)}: {placement}" for d, placement in enumerate(parameter.placements)]
    if looked_up:
        unit.placements.add(", ".join(text) + ", rows")
        return
    unit.placements.add(" x ".join(text))
    _add_traffic(unit, parameter, names, width if compute is None else compute.itemsize, wire)


def _add_traffic(
    unit: Unit, parameter: DTensor, names: Sequence[str], gathered_width: int, wire: torch.dtype | None
) -> None:
    """Add what a rank sends and receives for a shard. names: those of the dimensions of its mesh."""
    shards = copies = tp = 1
    for size, name, placement in zip(parameter.device_mesh.shape, names, parameter.placements, strict=True):
        if name == "tp":  # these parts are computed with, not gathered
            tp *= 1 if placement.is_replicate() else size
        elif placement.is_replicate():
            copies *= size
        else:
            shards *= size
    rows = parameter.shape[0]
    part = -(-rows // shards) * (parameter.numel() // max(rows, 1)) // tp
    unit.gathered += (shards - 1) * part * gathered_width
    if parameter.requires_grad:
        sent = parameter.element_size() if wire is None else wire.itemsize
        unit.reduced += (shards - 1) * part * sent
        # A ring all-reduce: each rank passes each part on once for the sum and once for the result.
        unit.copied += 2 * (copies - 1) * part * sent // copies
