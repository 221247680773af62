"""Which tensors of a model each stage of a pipeline holds: the whole model as it was, and this rank's part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from engine import runtime
from engine.collectives import gather_objects
from engine.lockstep import where_to_look
from engine.names import clean_name, model_tensors, state_dict_tensors
from engine.notes import ABSENT, set_stages, stages_of
from engine.parallel.gloo.point_to_point import wait_for
from engine.parallel.pipeline.p2p import Neighbours
from engine.parallel.pipeline.schedule import split_units
from engine.tensors import as_bytes, whole_of


class Stages:
    """A model as it was before it was cut down to this rank's stage.

    Attributes:
        rank, size: of the stage.
        whole: {name: meta tensor} of all parameters and persistent buffers of the model, in its order.
        names: {name: its name in whole} of all that ``state_dict()`` had, in that order: tied ones have several.
        parameters: names of the parameters.
        spread: names of those that the stages have different ones of. copies: names among them that this stage holds
            too but another one owns: the table of a tied head, a position bias that blocks share.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank, self.size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self.whole = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in model_tensors(model)}
        first: dict[int, str] = {}
        self.names = {name: first.setdefault(id(tensor), name) for name, tensor in state_dict_tensors(model)}
        self.parameters = [clean_name(name) for name, _ in model.named_parameters()]
        self.spread, self.copies = set(self.whole), set[str]()
        self._names: list[set[str]] = []

    def holders(self, names: Iterable[str]) -> list[set[str]]:
        """The names that each stage holds; asked once. Collective."""
        if not self._names:
            self._names = gather_objects(set(names), self.mesh["pp"].get_group())
        return self._names

    def elsewhere(self, model: nn.Module) -> set[str]:
        """Names of parameters and persistent buffers that other stages hold and ``model``, this one, does not."""
        return set(self.whole) - {name for name, _ in model_tensors(model)}


def split_block_lists(model: nn.Module, lists: Iterable[nn.ModuleList], mesh: DeviceMesh) -> None:
    """Keep this rank's stage of each of ``lists``, and all of the rest of ``model``, in place; on meta too."""
    stages = Stages(model, mesh)
    stages.spread = set()
    Neighbours(mesh)  # made here by all ranks at once, used in forward
    names = {module: name for name, module in model.named_modules()}
    for blocks in lists:
        for stage, part in enumerate(split_units(len(blocks), stages.size)):
            for index in part:
                prefix = clean_name(names[blocks[index]]) + "."
                stages.spread |= {name for name in stages.whole if name.startswith(prefix)}
                if stage != stages.rank:
                    remove_tensors(blocks[index])
    set_stages(model, stages)


def is_absent(module: nn.Module) -> bool:
    """Whether the module is on another stage."""
    return ABSENT.get(module)


def absent_names(model: nn.Module) -> set[str]:
    """Names of modules, and of their parameters, that are on other stages."""
    return elsewhere(model) | {clean_name(name) for name, m in model.named_modules() if is_absent(m)}


def elsewhere(model: nn.Module) -> set[str]:
    """Names of parameters and persistent buffers that other stages hold and this one does not."""
    return set() if (stages := stages_of(model)) is None else stages.elsewhere(model)


def gather_from_stages(model: nn.Module, value: Any) -> list[Any]:
    """``value`` of each stage, by pickle; collective where ``model`` is split. Without a split: [value]."""
    stages = stages_of(model)
    return [value] if stages is None else gather_objects(value, stages.mesh["pp"].get_group())


@torch.no_grad()
def whole_tensor(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    """One tensor of ``model``, whole, on rank 0 at least; None on ranks that do not need it. Collective.

    Args:
        tensors: what this rank holds of the model, by name.

    Raises RuntimeError: the stage that has it did not come within the timeout of ``init_distributed``.
    """
    stages, held = stages_of(model), tensors.get(name)
    full = None if held is None else whole_of(held)
    if stages is None:
        return full
    owner = next(stage for stage, names in enumerate(stages.holders(tensors)) if name in names)
    if owner == 0 or runtime.rank() % (runtime.world_size() // stages.size):
        return full  # the ranks in line with rank 0 hand it on
    group = stages.mesh["pp"].get_group()
    if stages.rank == owner:
        assert full is not None
        full = full.contiguous()
        _wait_for_stage(dist.isend(as_bytes(full), group=group, group_dst=0), name, group, 0)
    elif stages.rank == 0:
        full = torch.empty_like(stages.whole[name], device=runtime.device())
        _wait_for_stage(dist.irecv(as_bytes(full), group=group, group_src=owner), name, group, owner)
    return full


def _wait_for_stage(work: Any, name: str, group: dist.ProcessGroup, other: int) -> None:
    """Wait until this tensor has gone to the other stage of the group, or has come from it."""
    try:
        wait_for(work)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {runtime.rank()} waited for rank {dist.get_global_rank(group, other)}, another stage of the model "
            f"(pp_size), to exchange {name}, but it did not arrive (timeout: {runtime.last_timeout():g} s). "
            f"{where_to_look(error)}"
        ) from error


def remove_tensors(module: nn.Module) -> None:
    """Remove the parameters and buffers of a module that other stages have."""
    for inner in module.modules():
        for tensors in (inner._parameters, inner._buffers):
            tensors.update(dict.fromkeys(tensors))
        ABSENT.set(inner, True)
