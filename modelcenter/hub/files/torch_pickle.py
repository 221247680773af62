"""PyTorch's pickles of weights (`.bin`, `.pt`): tensors are located in the file if possible, or else loaded whole.

Files are opened with `weights_only`, so no code in them runs.
"""

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.safe_pickle import refuse_compressed
from modelcenter.hub.files.git_lfs import refuse_lfs_pointer
from modelcenter.hub.files.reader import TensorInfo

_LEGACY_LIMIT = 4 * 10**9  # largest pickle without random access that is read whole


def pickle_tensors(path: Path) -> tuple[dict[str, TensorInfo], dict[str, torch.Tensor]]:
    """The tensors of a `.bin` file, and those of them that are in memory because the file cannot be read in part.

    Raises:
        ValueError: it is not a file of tensors, damaged, or too large to be loaded whole.
    """
    refuse_lfs_pointer(path)
    if not zipfile.is_zipfile(path):
        loaded = _load_whole(path)
        return {n: TensorInfo(path, 0, t.dtype, tuple(t.shape), tuple(t.stride())) for n, t in loaded.items()}, loaded
    refuse_compressed(path)
    return _locate_tensors(path), {}


def _load_whole(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickle written by PyTorch before 1.6, which is not a zip archive."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if file.read(4) == b"PK\x03\x04":
            raise ValueError(f"{path} is truncated: it is a zip archive without its end (it has {size} bytes)")
    if size > _LEGACY_LIMIT:
        raise ValueError(
            f"{path} is a pickle of PyTorch before 1.6, which can only be loaded whole ({size} bytes). Convert it "
            "once on a large machine: torch.save(torch.load(path, weights_only=True), path)"
        )
    return _state_dict(_torch_load(path), path)


def _locate_tensors(path: Path) -> dict[str, TensorInfo]:
    """Find the positions of the tensors in a zip archive of torch.save."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes half a second to import, and is needed only here

    with FakeTensorMode():  # tensors without data, whose storages know their position in the file
        fakes = _state_dict(_torch_load(path), path)
    tensors, size = {}, path.stat().st_size
    for name, fake in fakes.items():
        if fake.is_neg():
            raise ValueError(
                f"{path}: tensor {name!r} is the negative of its data in the file. Save its .resolve_neg()"
            )
        item = fake.dtype.itemsize
        storage = fake.untyped_storage()._checkpoint_offset
        if storage is None:
            raise ValueError(f"{path}: tensor {name!r} has no data of its own in the file")
        begin = storage + int(fake.storage_offset()) * item
        end = begin + item * (1 + sum((n - 1) * s for n, s in zip(fake.shape, fake.stride(), strict=True)))
        if end > size and fake.numel():
            raise ValueError(f"{path} is truncated: tensor {name!r} ends at byte {end}, the file has {size}")
        tensors[name] = TensorInfo(path, begin, fake.dtype, tuple(fake.shape), tuple(fake.stride()))
    return tensors


def _torch_load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types of errors for a bad file; each is reported with its cause
        raise ValueError(
            f"{path} cannot be read as weights: {_reason(error)}. "
            "Only tensors are read from a pickle, nothing in it is executed; a file that holds other objects, or is "
            "damaged, must be converted to safetensors by someone who trusts it"
        ) from error


def _reason(error: Exception) -> str:
    """The reason for which torch.load refuses a file, without its advice to run the code in the file."""
    text = str(error)
    if named := re.search(r"GLOBAL (\S+)", text):
        return f"it holds {named[1]}, which is not a tensor"
    if unread := re.search(r"WeightsUnpickler error:\s*(\S.*)", text):
        return unread[1]
    return text.partition(" In PyTorch 2.6")[0].partition("\n")[0].rstrip(".") or type(error).__name__


def _state_dict(loaded: Any, path: Path) -> dict[str, torch.Tensor]:
    # the keys of Lightning; of PyTorch's tutorials; of fairseq and many scripts; of DeepSpeed
    for wrapper in ("state_dict", "model_state_dict", "model", "module"):
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict) or not all(isinstance(k, str) for k in loaded):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected a dictionary of tensors by name")
    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    others = [name for name in loaded if name not in tensors]
    if others or not tensors:
        raise ValueError(f"{path}: expected a dictionary of tensors by name, but {others[:3] or 'it'} holds none")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ValueError(f"{path}: tensor {name!r} is sparse ({tensor.layout}). Save its .to_dense()")
    return tensors
