"""The model in a checkpoint: written and read by slices, on any mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from engine import runtime
from engine.checkpoint.described import METADATA, stand_in, stored_metadata
from engine.checkpoint.files import atomic_directory, check_manifest, together
from engine.init import clean_name
from engine.parallel.shard import reshard
from engine.parallel.stages import stages_of
from engine.torch_compat import detached, local_box, local_tensor

MODEL = "model"


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of ``model`` holds: parameters (tied ones once) and persistent buffers, by clean name.

    Sharded parameters are DTensors; all are detached and share the model's memory. Of a model that is split into
    stages, those of this rank's stage.
    """
    reshard(model)  # after an evaluation the model may still show gathered parameters
    found = {clean_name(name): detached(parameter) for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[clean_name(f"{prefix}.{name}" if prefix else name)] = detached(buffer)
    return found


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
        if isinstance(tensor, DTensor):
            _, offset = local_box(tensor.shape, tensor.device_mesh, tensor.placements)
            place = tensor.device_mesh.get_coordinate() or ()
            first = all(not p.is_replicate() or c == 0 for p, c in zip(tensor.placements, place, strict=True))
            first = first and ("tp" in (tensor.device_mesh.mesh_dim_names or ()) or not _tp_rank())
        if local.numel() and (first or not owned):
            yield name, offset, local


def _tp_rank() -> int:
    return runtime.mesh()["tp"].get_local_rank()


def save_model(
    directory: str | os.PathLike[str], model: nn.Module, extra: Callable[[Path], None] | None = None
) -> None:
    """Write a checkpoint of ``model``. Collective; ``directory`` must be on a file system that all ranks share.

    Everything is written beside and renamed in the end, so ``directory`` is never half. An existing one is replaced.

    Args:
        extra: called on rank 0 with the directory under construction, to add files.

    Raises:
        RuntimeError or OSError: writing failed on a rank; raised on every rank, and ``directory`` is as it was.
    """
    with atomic_directory(directory) as path:
        write_model(path, model)
        if extra is not None:
            with together(f"writing to {directory}"):
                if runtime.rank() == 0:
                    extra(path)


def write_model(path: Path, model: nn.Module) -> None:
    """Write ``model`` under ``path``/model, inside ``atomic_directory``. Collective."""
    tensors = named_tensors(model)
    if lost := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(f"parameter {lost[0]} is on the meta device, so there is nothing to save: load weights first")
    write_tensors(path / MODEL, tensors)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write plain tensors (equal on all ranks) and DTensors as a DCP directory. Collective over ``group``."""
    from engine.checkpoint import dcp  # in the thread of an asynchronous save: training does not wait for it

    dcp.write(path, tensors, group)


def read_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill ``tensors`` from a DCP directory. Collective."""
    from engine.checkpoint import dcp

    dcp.read(path, tensors)


def load_model(
    directory: str | os.PathLike[str], model: nn.Module, strict: bool = True, verify: bool = False
) -> tuple[list[str], list[str]]:
    """Fill ``model``, plain or sharded on any mesh, from a checkpoint; each rank reads its slices. Collective.

    Values are converted to the model's dtypes.

    Args:
        strict: the names must be equal; else what both have is loaded.
        verify: also compare the files' sha256, which reads them once more.

    Returns:
        (names that only the model has, names that only the checkpoint has), sorted.

    Raises:
        ValueError: the checkpoint is missing, incomplete or damaged (the file is named), names differ, shapes differ,
            or a parameter is on meta. On every rank.
    """
    with together(f"reading {directory}"):
        if runtime.rank() == 0:
            check_manifest(directory, hashes=verify)
    stored = stored_tensors(directory)
    tensors = named_tensors(model)
    whole = all_tensors(model)
    missing, unexpected = sorted(set(whole) - set(stored)), sorted(set(stored) - set(whole))
    if strict and (missing or unexpected):
        text = "; ".join(
            f"{what}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        )
        raise ValueError(f"checkpoint {directory} does not match {type(model).__name__}: {text}")
    wanted = {name: tensor for name, tensor in tensors.items() if name in stored}
    for name, tensor in wanted.items():
        if tensor.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: call engine.materialize(model) before loading")
    for name, tensor in whole.items():
        if name in stored and tuple(tensor.shape) != stored[name][0]:
            raise ValueError(
                f"tensor {name} has shape {stored[name][0]} in checkpoint {directory} and {tuple(tensor.shape)} in the "
                "model"
            )
    read_tensors(Path(directory) / MODEL, wanted)
    return missing, unexpected


def stored_tensors(
    directory: str | os.PathLike[str], part: str = MODEL
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """{name: (shape, dtype)} of a checkpoint's model, without reading a tensor. ValueError if it cannot be read."""
    return {
        name: (tuple(entry.size), entry.properties.state[0])
        for name, entry in stored_metadata(directory, part).state_dict_metadata.items()
        if isinstance(entry, stand_in(METADATA, "TensorStorageMetadata"))
    }
