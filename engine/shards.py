"""What a rank holds of a model: its memory, and its slices of each tensor.

A plain model in one process is handled without importing DTensor and FSDP, which takes longer than loading a model of a
gigabyte.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from engine import runtime
from engine.init import init_parameters_, module_rule, on_meta, stand_in
from engine.mixed_precision import hide_casts_of
from engine.names import clean_name, model_tensors
from engine.notes import note_parameters, stages_of
from engine.parallel.mesh import device_mesh
from engine.tensors import detached, is_shard, local_box, local_tensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def _any_sharded() -> bool:
    """Whether this process may have a sharded model: FSDP was imported."""
    return "torch.distributed.fsdp" in sys.modules


def is_sharded(model: nn.Module) -> bool:
    """Whether ``model`` itself (not just a module in it) is sharded."""
    if not _any_sharded():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def sharded_roots(model: nn.Module) -> list[FSDPModule]:
    """The outermost sharded modules in ``model``, itself included."""
    if not _any_sharded():
        return []
    from torch.distributed.fsdp import FSDPModule

    found: list[FSDPModule] = []
    left = [model]
    while left:  # called in every step: avoids a generator for each module
        module = left.pop()
        if isinstance(module, FSDPModule):
            found.append(module)
        elif module._modules:
            left += [child for child in reversed(dict.fromkeys(module._modules.values())) if child is not None]
    return found


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of ``model`` holds: parameters (tied ones once) and persistent buffers, by clean name.

    Sharded parameters are DTensors; all tensors are detached and share the model's memory. In a pipeline they are those
    of this rank's stage.
    """
    show_own_parameters(model)
    return {name: detached(tensor) for name, tensor in model_tensors(model)}


def show_own_parameters(model: nn.Module) -> None:
    """Make ``model`` show the parameters that it keeps: no gathered ones, which a forward without a backward (its own
    or an enclosing model's) may have left, and no casts, which a backward that raised may have left."""
    if _any_sharded():
        from engine.parallel.fsdp import reshard, reshard_around

        reshard(model)
        reshard_around(model)
    for module in model.modules():
        hide_casts_of(module)


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """``named_tensors`` of the whole model; in a pipeline, whose stages have different tensors, on meta."""
    stages = stages_of(model)
    return named_tensors(model) if stages is None else dict(stages.whole)


def local_slices(model: nn.Module, owned: bool = False) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Yield (name, offsets of the slice in the whole tensor, slice) for what this rank holds of each of the tensors.

    The slices share the model's memory, so writing to them changes the model. Empty slices are left out. A plain tensor
    is one slice at offset 0.

    Args:
        owned: leave out what a lower rank holds too, so that each element comes exactly once over all ranks.
    """
    stages = stages_of(model)
    # Without a process group, a launcher's ranks may belong to another library.
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name, tensor in named_tensors(model).items():
        if owned and stages is not None and name in stages.copies:
            continue
        local = local_tensor(tensor)
        offset = (0,) * tensor.ndim
        holders = ranks // (1 if stages is None or name not in stages.spread else stages.size)
        first = rank % holders == 0
        if is_shard(tensor):
            _, offset = local_box(tensor.shape, tensor.device_mesh, tensor.placements)
            first = is_first_holder(tensor)
        if local.numel() and (first or not owned):
            yield name, offset, local


def is_first_holder(shard: Any) -> bool:
    """Whether this is the first of the ranks that hold the same part of a DTensor."""
    mesh = shard.device_mesh
    first = all(not p.is_replicate() or c == 0 for p, c in zip(shard.placements, mesh.get_coordinate(), strict=True))
    # The mesh of a parameter that tensor parallelism does not split has no tp dimension: each tp rank has all of it.
    return first and ("tp" in (mesh.mesh_dim_names or ()) or device_mesh()["tp"].get_local_rank() == 0)


def user_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes that the user has set on the parameters, such as ``no_decay``: {name: attributes}."""
    return {
        name: {k: v for k, v in vars(parameter).items() if not k.startswith(("_engine", "_fsdp"))}
        for name, parameter in model.named_parameters()
    }


def set_user_attributes(model: nn.Module, saved: Mapping[str, dict[str, Any]]) -> None:
    """Carry ``user_attributes`` over to the parameters that have replaced the original ones."""
    for name, parameter in model.named_parameters():
        vars(parameter).update({k: v for k, v in saved.get(name, {}).items() if k not in vars(parameter)})


def materialize(model: nn.Module, seed: int = 0, init: bool | Collection[str] = False) -> nn.Module:
    """Allocate a model that was built on meta on this rank's device; only its shards, if it is sharded.

    Non-persistent buffers, which no checkpoint holds, are restored by ``module.reset_buffers()``, ``transformers``'
    ``_init_weights`` or ``module.reset_parameters()``. Tied parameters stay tied. Tensors that are not on meta stay as
    they are.

    Args:
        model: changed in place, and returned.
        seed: seeds the initial values.
        init: the parameters to initialise (see ``engine.init``). True: all that were on meta; a collection: those
            names; False: none, so they hold garbage until a checkpoint is loaded.

    Raises:
        ValueError: a non-persistent buffer cannot be restored, or a name in ``init`` is not a parameter.
    """
    device = runtime.device()
    _restore_buffers(model, device)
    meta = [clean_name(name) for name, p in model.named_parameters() if p.is_meta]
    if meta:
        ties, attributes = _ties(model), user_attributes(model)
        model._apply(lambda t: _empty(t, device) if t.is_meta else t)
        # _apply made a parameter for each place; FSDP keeps the one at the first place.
        for (first, first_name), *others in ties:
            for module, name in others:
                module._parameters[name] = first._parameters[first_name]
        set_user_attributes(model, attributes)
    note_parameters(model)
    if init is not False:
        init_parameters_(model, seed, meta if init is True else init)
    return model


def _empty(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if is_shard(tensor) or not tensor.is_contiguous():
        return torch.empty_like(tensor, device=device)
    # torch implements `empty_like` of a meta tensor in Python, which imports sympy.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """For each parameter that occurs in several places: these places, as (module, name) pairs."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [group for group in places.values() if len(group) > 1]


@torch.no_grad()
def _restore_buffers(model: nn.Module, device: torch.device) -> None:
    for prefix, module in model.named_modules():
        lost = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not lost:
            continue
        for name in lost:
            fill = _unlikely(module._buffers[name].dtype)
            module._buffers[name] = torch.full_like(module._buffers[name], fill, device=device)
        if callable(getattr(module, "reset_buffers", None)):
            module.reset_buffers()
        elif rule := module_rule(model, module):
            # The rule sets parameters too. Here they are on meta, where that has no effect.
            clone = stand_in(module, on_meta(module._parameters), dict(module._buffers))
            rule(clone)
            module._buffers.update({name: clone._buffers[name] for name in lost})
        for name in lost:
            buffer = module._buffers[name]
            untouched = buffer.isnan() | (buffer == _unlikely(buffer.dtype))
            if name in module._non_persistent_buffers_set and buffer.dtype != torch.bool and bool(untouched.any()):
                full = f"{prefix}.{name}" if prefix else name
                raise ValueError(
                    f"buffer {full} was built on meta and is in no checkpoint, so its value is lost: give "
                    f"{type(module).__name__} a reset_buffers() that computes it in place"
                )


def _unlikely(dtype: torch.dtype) -> float:
    """A value that no rule produces, to detect buffers that were not written; bool has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    info = torch.iinfo(dtype)
    return info.min or info.max  # not 0, of which masks of unsigned integers are full
