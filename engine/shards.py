"""What a rank holds of a model: its memory, and its slices of each tensor.

A plain model in one process is handled without importing what shards are made by: torch's DTensor and FSDP take longer
to import than a model of a gigabyte takes to load.
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
    """Whether a model of this process may be sharded: FSDP was imported."""
    return "torch.distributed.fsdp" in sys.modules


def is_sharded(model: nn.Module) -> bool:
    """Whether ``engine.shard`` laid ``model`` itself over ranks."""
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
    while left:  # each step asks: without generators for each module
        module = left.pop()
        if isinstance(module, FSDPModule):
            found.append(module)
        elif module._modules:
            left += [child for child in reversed(dict.fromkeys(module._modules.values())) if child is not None]
    return found


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of ``model`` holds: parameters (tied ones once) and persistent buffers, by clean name.

    Sharded parameters are DTensors; all are detached and share the model's memory. Of a model that is split into
    stages, those of this rank's stage.
    """
    show_own_parameters(model)
    return {name: detached(tensor) for name, tensor in model_tensors(model)}


def show_own_parameters(model: nn.Module) -> None:
    """Let ``model`` show what it keeps of its parameters: no gathered ones, as it may after a forward without a
    backward, its own or that of a model around it, and no casts, as it may after a backward that raised."""
    if _any_sharded():
        from engine.parallel.fsdp import reshard, reshard_around

        reshard(model)
        reshard_around(model)
    for module in model.modules():
        hide_casts_of(module)


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """``named_tensors`` of the whole model: where stages have different ones, meta tensors of the same shapes."""
    stages = stages_of(model)
    return named_tensors(model) if stages is None else dict(stages.whole)


def local_slices(model: nn.Module, owned: bool = False) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """(name, offsets of the slice in the whole tensor, slice) for what this rank holds of each tensor of ``model``.

    The slices share the model's memory: writing to them writes the model. Empty ones are left out. Plain and sharded
    models alike; a plain tensor is one slice at offset 0.

    Args:
        owned: leave out what a lower rank holds too, so that over all ranks each element comes exactly once.
    """
    stages = stages_of(model)
    # Without a process group the ranks of a launcher may be another library's.
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
    """Whether of the ranks that hold the same part of a DTensor this is the first."""
    mesh = shard.device_mesh
    first = all(not p.is_replicate() or c == 0 for p, c in zip(shard.placements, mesh.get_coordinate(), strict=True))
    # What tensor parallelism does not split is on a mesh without its ranks, each of which has all of it.
    return first and ("tp" in (mesh.mesh_dim_names or ()) or device_mesh()["tp"].get_local_rank() == 0)


def user_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What users have set on the parameters, such as which ones have no weight decay: {name: attributes}."""
    return {
        name: {k: v for k, v in vars(parameter).items() if not k.startswith(("_engine", "_fsdp"))}
        for name, parameter in model.named_parameters()
    }


def set_user_attributes(model: nn.Module, saved: Mapping[str, dict[str, Any]]) -> None:
    """Set ``user_attributes`` on the parameters that took the places of those that had them."""
    for name, parameter in model.named_parameters():
        vars(parameter).update({k: v for k, v in saved.get(name, {}).items() if k not in vars(parameter)})


def materialize(model: nn.Module, seed: int = 0, init: bool | Collection[str] = False) -> nn.Module:
    """Give a model built on meta its memory on this rank's device: its shards only, where it is sharded.

    Non-persistent buffers, which no checkpoint holds, get their values back from ``module.reset_buffers()``, from
    ``transformers``' ``_init_weights`` or from ``module.reset_parameters()``. Tied parameters stay tied. Tensors that
    are not on meta stay as they are.

    Args:
        model: in place, returned.
        seed: of the initial values.
        init: the parameters to initialise (see ``engine.init``): True: all that were on meta; names; False: none, they
            hold garbage until a checkpoint fills them.

    Raises:
        ValueError: a non-persistent buffer cannot be restored, or a name in ``init`` is not a parameter.
    """
    device = runtime.device()
    _restore_buffers(model, device)
    meta = [clean_name(name) for name, p in model.named_parameters() if p.is_meta]
    if meta:
        ties, attributes = _ties(model), user_attributes(model)
        model._apply(lambda t: _empty(t, device) if t.is_meta else t)
        # _apply made one parameter per place; FSDP keeps the one at the first place.
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
    # Of a tensor on meta `empty_like` is written in Python, and imports sympy.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that is in several."""
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
            # The rule sets parameters too; here it is given meta ones, on which that does nothing.
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
    """A value that no rule leaves, to see whether it wrote a buffer; of bool there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    info = torch.iinfo(dtype)
    return info.min or info.max  # masks of unsigned numbers are full of zeros
