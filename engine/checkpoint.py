"""Distributed checkpoints: a directory that is complete or absent, readable on any number of ranks.

::

    manifest.json     format_version and, for each other file, its size in bytes and its sha256
    model/            the parameters and persistent buffers, by torch.distributed.checkpoint
    ...               what the caller adds (configuration, tokenizer)
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard

from engine import runtime
from engine.init import clean_name
from engine.parallel.shard import reshard
from engine.torch_compat import local_box, local_tensor

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_MODEL = "model"


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of ``model`` holds: parameters (tied ones once) and persistent buffers, by clean name.

    Sharded parameters are DTensors; all are detached and share the model's memory.
    """
    reshard(model)  # after an evaluation the model may still show gathered parameters
    found = {clean_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[clean_name(f"{prefix}.{name}" if prefix else name)] = buffer.detach()
    return found


def local_slices(model: nn.Module, owned: bool = False) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """(name, offsets of the slice in the whole tensor, slice) for what this rank holds of each tensor of ``model``.

    The slices share the model's memory: writing to them writes the model. Empty ones are left out. Plain and sharded
    models alike; a plain tensor is one slice at offset 0.

    Args:
        owned: leave out what a lower rank holds too, so that over all ranks each element comes exactly once.
    """
    for name, tensor in named_tensors(model).items():
        local = local_tensor(tensor)
        offset = (0,) * tensor.ndim
        first = not owned or runtime.rank() == 0
        if isinstance(tensor, DTensor):
            _, offset = local_box(tensor.shape, tensor.device_mesh, tensor.placements)
            place = tensor.device_mesh.get_coordinate() or ()
            first = all(isinstance(p, Shard) or c == 0 for p, c in zip(tensor.placements, place, strict=True))
        if local.numel() and (first or not owned):
            yield name, offset, local


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
    with _alone_is_fine():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path / _MODEL), no_dist=not dist.is_initialized())


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
    reader = _Reader(Path(directory) / _MODEL)
    stored = _stored(reader)
    tensors = named_tensors(model)
    missing, unexpected = sorted(set(tensors) - set(stored)), sorted(set(stored) - set(tensors))
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
        if tuple(tensor.shape) != stored[name][0]:
            raise ValueError(
                f"tensor {name} has shape {stored[name][0]} in checkpoint {directory} and {tuple(tensor.shape)} in the "
                "model"
            )
    with _alone_is_fine():
        dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    return missing, unexpected


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Without torch's warning that one process without a process group is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def stored_tensors(directory: str | os.PathLike[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """{name: (shape, dtype)} of a checkpoint's model, without reading a tensor. ValueError if it cannot be read."""
    return _stored(_Reader(Path(directory) / _MODEL))


def _stored(reader: _Reader) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    try:
        metadata = reader.read_metadata()
    except (OSError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{reader.path}/.metadata cannot be read: {error}") from error
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class _Reader(dcp.FileSystemReader):
    """Reads the metadata as data: torch unpickles it, and a pickle from the Hub could run anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    _ALLOWED = {
        "builtins": {"set", "frozenset", "dict", "list", "tuple"},
        "collections": {"OrderedDict", "defaultdict"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
        "torch": {"Size", "device"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (
            name in self._ALLOWED.get(module, ())
            or (module == "torch.distributed.checkpoint.metadata" and not name.startswith("__"))
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of ours does")


@contextmanager
def atomic_directory(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a directory to write into, the same on all ranks; at the end it gets a manifest and becomes ``directory``.

    Collective. If the body raises on any rank, everything written is removed and every rank raises; a rank that fails
    must do so before, or inside ``together`` around, what the others wait for.
    """
    target = Path(directory).absolute()
    place: list[str] = [""]
    with together(f"creating {target}"):
        if runtime.rank() == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            for left in target.parent.glob(f".{target.name}.partial-*"):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            place[0] = str(target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
            Path(place[0]).mkdir()
    if runtime.world_size() > 1:
        dist.broadcast_object_list(place, src=0)
    path = Path(place[0])
    try:
        with together(f"writing {target}"):
            yield path
        with together(f"writing {target}"):
            files = _hash_files(path)
            if runtime.rank() == 0:
                (path / MANIFEST).write_text(json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1))
                _sync(path)
                _replace(path, target)
    finally:
        if runtime.rank() == 0:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def together(doing: str) -> Iterator[None]:
    """If the body raises on one rank, every rank raises: the others a ValueError or RuntimeError that names the rank.

    Collective. ValueError stays ValueError, as it is the user's to fix.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if runtime.world_size() > 1:
        notes: list[tuple[bool, str] | None] = [None] * runtime.world_size()
        dist.all_gather_object(notes, None if error is None else (isinstance(error, ValueError), repr(error)))
        for rank, note in enumerate(notes):
            if note is not None and error is None:
                kind = ValueError if note[0] else RuntimeError
                raise kind(f"rank {rank} failed while {doing}: {note[1]}")
    if error is not None:
        raise error


def _hash_files(path: Path) -> dict[str, dict[str, Any]]:
    """{relative path: {size, sha256}}; the ranks share the work."""
    world = runtime.world_size()
    names: list[Any] = [sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())]
    if world > 1:
        dist.broadcast_object_list(names, src=0)
    found: dict[str, dict[str, Any]] = {}
    failure: OSError | None = None
    try:
        for name in names[0][runtime.rank() :: world]:
            found[name] = {"size": (path / name).stat().st_size, "sha256": _sha256(path / name)}
    except OSError as error:
        failure = error
    if world > 1:
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, found)
        found = {name: entry for part in parts for name, entry in part.items()}
    if failure is not None:
        raise RuntimeError(
            f"rank {runtime.rank()} does not see what rank 0 wrote ({failure}): a checkpoint must be on a file system "
            "that all ranks share"
        )
    return {name: found[name] for name in sorted(found)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Ask the system to put all files and directories under ``path`` on the disk."""
    for entry in [*path.rglob("*"), path]:
        _fsync(entry)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, target: Path) -> None:
    old = target.parent / f".{target.name}.old-{uuid.uuid4().hex[:8]}"
    if target.exists():
        target.rename(old)
    path.rename(target)
    _fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def check_manifest(directory: str | os.PathLike[str], hashes: bool = False) -> dict[str, Any]:
    """Read a checkpoint's manifest and compare the files' sizes, and with ``hashes`` their sha256, with it.

    Raises ValueError that names the file and the difference. Not collective.
    """
    path = Path(directory)
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version, files = manifest["format_version"], manifest["files"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged: {error!r}") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path / MANIFEST} has format_version {version!r}, this version reads {FORMAT_VERSION}")
    for name, entry in files.items():
        file = path / name
        if not file.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{path / MANIFEST} names {name}, which is outside the checkpoint")
        if not file.is_file():
            raise ValueError(f"checkpoint {path} is incomplete: {name} is missing")
        if (size := file.stat().st_size) != entry["size"]:
            raise ValueError(
                f"checkpoint {path} is damaged: {name} has {size} bytes, its manifest says {entry['size']}"
            )
        if hashes and (found := _sha256(file)) != entry["sha256"]:
            raise ValueError(
                f"checkpoint {path} is damaged: {name} has sha256 {found}, its manifest says {entry['sha256']}"
            )
    return manifest
