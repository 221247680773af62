"""What a model is on these ranks: units, placements, memory and communication, computed and not measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

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
    """Parameters that are gathered together; sizes in bytes, of the whole unit unless they say rank.

    Attributes:
        gathered: what a rank receives when it gathers the unit once.
        reduced: what a rank sends when it reduces the unit's gradients to shards once.
        copied: what a rank sends when it then averages its shard with the other copies of the model.
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
    """``str`` of it is the table that ``describe`` prints.

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
    """Units, placements, bytes per rank and communication per step of a model, sharded or plain, also on meta.

    Not collective. Bytes are those of this rank; shards are padded to equal size when they travel, and this counts it.

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
    # Level 3 frees units after forward; the root and the last unit stay, for backward needs them first.
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
    shards = copies = 1
    text = []
    for dim, placement in enumerate(parameter.placements):
        text.append(f"{names[dim]} {mesh.size(dim)}: {placement}")
        if names[dim] != "tp":  # those shards are computed with, not gathered
            shards, copies = (
                (shards, copies * mesh.size(dim)) if placement.is_replicate() else (shards * mesh.size(dim), copies)
            )
    if looked_up:  # what travels is what a batch reads
        unit.placements.add(", ".join(text) + ", rows")
        return
    unit.placements.add(" x ".join(text))
    tp = math.prod(
        mesh.size(d) for d, p in enumerate(parameter.placements) if names[d] == "tp" and not p.is_replicate()
    )
    rows = parameter.shape[0]
    part = -(-rows // shards) * (parameter.numel() // max(rows, 1)) // tp
    unit.gathered += (shards - 1) * part * (width if compute is None else compute.itemsize)
    if parameter.requires_grad:
        sent = width if wire is None else wire.itemsize
        unit.reduced += (shards - 1) * part * sent
        # A ring: each rank sends its part on for the sum and again for the result.
        unit.copied += 2 * (copies - 1) * part * sent // copies
