"""The model in a checkpoint, written and read in slices on any mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from engine import runtime
from engine.checkpoint.dcp_metadata import METADATA, stand_in, stored_metadata
from engine.checkpoint.files import atomic_directory, check_manifest
from engine.collectives import together
from engine.names import unmatched
from engine.shards import all_tensors, named_tensors

MODEL = "model"


def save_model(
    directory: str | os.PathLike[str], model: nn.Module, extra: Callable[[Path], None] | None = None
) -> None:
    """Write a checkpoint of ``model``. Collective; ``directory`` must be on a file system that all ranks share.

    Everything is written to a temporary directory and renamed at the end, so ``directory`` is always complete. An
    existing checkpoint is replaced.

    Args:
        extra: called on rank 0 with the directory under construction, to add files.

    Raises:
        ValueError: ``directory`` has other files or cannot be replaced, or a parameter is on meta.
        RuntimeError or OSError: writing failed on a rank. Raised on every rank; ``directory`` is unchanged.
    """
    with atomic_directory(directory) as path:
        write_model(path, model)
        if extra is not None:
            with together(f"writing to {directory}"):
                if runtime.rank() == 0:
                    extra(path)


def write_model(path: Path, model: nn.Module) -> None:
    """Write ``model`` under ``path``/model, inside ``atomic_directory``. Collective."""
    with together("checking the parameters to write"):
        tensors = filled_tensors(model)
    write_tensors(path / MODEL, tensors)


def filled_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """``named_tensors`` of a model. Raises ValueError if one is on meta."""
    tensors = named_tensors(model)
    if lost := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(f"parameter {lost[0]} is on the meta device, so there is nothing to save: load weights first")
    return tensors


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write plain tensors (equal on all ranks) and DTensors as a DCP directory. Collective over ``group``."""
    from engine.checkpoint import dcp  # in an asynchronous save this runs in its thread, so training need not wait

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
        strict: names must be equal; otherwise the tensors that both have are loaded.
        verify: also compare the files' sha256, which reads them a second time.

    Returns:
        (names that only the model has, names that only the checkpoint has), sorted.

    Raises:
        ValueError: the checkpoint is missing, incomplete or damaged (the file is named), names or shapes differ, or a
            parameter is on meta. Raised on every rank.
    """
    with together(f"reading {directory}"):
        if runtime.rank() == 0:
            check_manifest(directory, hashes=verify)
        stored = stored_tensors(directory)
        wanted, missing, unexpected = _match(directory, model, stored, strict)
    read_tensors(Path(directory) / MODEL, wanted)
    return missing, unexpected


def _match(
    directory: str | os.PathLike[str],
    model: nn.Module,
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]],
    strict: bool,
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """(the tensors to fill, names that only the model has, names that only the checkpoint has); see ``load_model``."""
    whole = all_tensors(model)
    missing, unexpected = sorted(set(whole) - set(stored)), sorted(set(stored) - set(whole))
    if strict and (missing or unexpected):
        text = unmatched(missing, unexpected)
        raise ValueError(f"checkpoint {directory} does not match {type(model).__name__}: {text}")
    wanted = {name: tensor for name, tensor in named_tensors(model).items() if name in stored}
    for name, tensor in wanted.items():
        if tensor.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: call engine.materialize(model) before loading")
    for name, tensor in whole.items():
        if name in stored and tuple(tensor.shape) != stored[name][0]:
            raise ValueError(
                f"tensor {name} has shape {stored[name][0]} in checkpoint {directory} and {tuple(tensor.shape)} in the "
                "model"
            )
    return wanted, missing, unexpected


def stored_tensors(
    directory: str | os.PathLike[str], part: str = MODEL
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """{name: (shape, dtype)} of the tensors in a part of a checkpoint, without reading them. Raises ValueError if that
    is not possible."""
    return {
        name: (tuple(entry.size), entry.properties.state[0])
        for name, entry in stored_metadata(directory, part).state_dict_metadata.items()
        if isinstance(entry, stand_in(METADATA, "TensorStorageMetadata"))
    }
