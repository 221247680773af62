"""``save`` and ``load``: a whole model in one ``.pt`` file, in the format of ``torch.save(model.state_dict())``."""

from __future__ import annotations

import functools
import glob
import os
import re
import time
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from engine import runtime
from engine.background import Background
from engine.bmtrain.model import broadcast_, shard_from_rank_0
from engine.checkpoint.safe_pickle import refuse_compressed
from engine.collectives import from_rank_0, together
from engine.init import write_
from engine.names import state_dict_tensors, unmatched
from engine.notes import stages_of
from engine.parallel.pipeline.stages import is_absent, whole_tensor
from engine.policy import Policy
from engine.shards import show_own_parameters
from engine.tensors import is_shard


class LoadResult(NamedTuple):
    """The names that ``load`` could not match."""

    missing_keys: list[str]
    unexpected_keys: list[str]


_ABANDONED = 3600.0  # seconds without a write, after which an unfinished file counts as abandoned
_writer: Background | None = None  # the save in progress, at most one


def save(model: nn.Module, file_name: str | os.PathLike[str], non_blocking: bool = False) -> None:
    """Write the whole model, plain or sharded, to one file on rank 0. Collective.

    Parameters are gathered one at a time and collected in rank 0's host memory, so the model must fit there. The file
    has the names of the unsharded model, tied ones included; it is complete or absent.

    Args:
        model: parameters and persistent buffers are saved.
        file_name: a path on rank 0.
        non_blocking: return when the values are copied, and write in a thread. The next ``save`` or ``load``, and the
            end of the program, wait for the thread. An error is logged, and raised by the next ``save`` or ``load``.

    Raises:
        OSError or RuntimeError: the file cannot be written. Raised on every rank.
        ValueError: a parameter is on meta, or the model is a part of another one and has blocks on other stages.
    """
    global _writer
    _finish()
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    collected: dict[int, torch.Tensor] = {}  # a tied tensor is gathered and stored once
    with torch.no_grad():
        held = _named_tensors(model)
        with together("checking the parameters to write"):
            _check_stages(model)
            if lost := next((name for name, tensor in held.items() if tensor.is_meta), None):
                raise ValueError(f"parameter {lost} is on the meta device, so there is nothing to save")
        for name, (first, tensor) in _everything(model, held).items():
            if id(tensor) not in collected:
                gathered = whole_tensor(model, held, first)
                whole = tensor.new_empty(0, device="cpu") if gathered is None else gathered.detach()
                # Later steps must not change what the thread writes.
                copied = whole.to("cpu", copy=non_blocking or whole.device.type == "cpu")
                collected[id(tensor)] = copied if runtime.rank() == 0 else copied.new_empty(0)
            if runtime.rank() == 0:
                state[name] = collected[id(tensor)]
    with together(f"writing {file_name}"):
        if runtime.rank() == 0 and non_blocking:
            _writer = Background(functools.partial(_write, state, file_name), os.fspath(file_name))
            _writer.start()
        elif runtime.rank() == 0:
            _write(state, file_name)


def load(
    model: nn.Module, file_name: str | os.PathLike[str], strict: bool = True, policy: Policy | None = None
) -> LoadResult:
    """Fill ``model`` from a file of ``save``, or of ``torch.save`` of a state dict; shard it first if necessary.

    Collective. Rank 0 reads the file (memory-mapped) and broadcasts one tensor at a time; each rank keeps its slice.
    Values are converted to the model's dtypes. For a tied parameter, one of its names is enough.

    Args:
        model: plain, sharded, or built on meta.
        file_name: a path on rank 0.
        strict: names must agree; otherwise the tensors that both have are loaded.
        policy: that of the sharding; None: ``Policy()``.

    Returns:
        (missing_keys, unexpected_keys), sorted.

    Raises:
        ValueError: the file is not a state dict, names or shapes differ, or a parameter on meta is not in the file.
            Raised on every rank.
    """
    _finish()
    first = runtime.rank() == 0
    stored: dict[str, torch.Tensor] = {}
    with together(f"reading {file_name}"):
        if first:
            stored = _read(file_name)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = from_rank_0(
        {name: (tuple(t.shape), t.dtype) for name, t in stored.items()}
    )
    with together(f"reading {file_name}"):
        _check_stages(model)
        sources, missing, unexpected = _match(model, shapes, file_name, strict)
    shard_from_rank_0(model, policy, overwritten=set(sources))
    stages, home = stages_of(model), runtime.device()
    # Parameters shared by blocks of several stages have one source, under the first block's name.
    first_of = {} if stages is None else stages.names
    by_name = {first_of.get(name, name): tensor for name, tensor in _named_tensors(model).items()}
    for name, source in sources.items():
        shape, dtype = shapes[source]
        # Every rank takes part in each broadcast, and ignores tensors of other stages of a pipeline.
        whole = stored[source].to(home).contiguous() if first else torch.empty(shape, dtype=dtype, device=home)
        broadcast_(whole)
        if name in by_name:
            write_(by_name[name], whole)
    return LoadResult(missing, unexpected)


def _check_stages(model: nn.Module) -> None:
    """Raise ValueError for a part of a model with blocks on other stages: only the whole model knows those."""
    absent = next((name for name, m in model.named_modules() if is_absent(m)), None)
    if absent is not None and stages_of(model) is None:
        raise ValueError(
            f"{absent or 'all'} of this {type(model).__name__} is on another stage of the pipeline: save and load the "
            "model that was sharded, not a part of it with blocks of the pipeline"
        )


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's tensors of ``model.state_dict()``, tied ones under each of their names."""
    show_own_parameters(model)
    return dict(state_dict_tensors(model))


def _everything(model: nn.Module, held: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
    """{name: (name on the stages, tensor)} of the whole model; tensors of other stages are on meta."""
    if (stages := stages_of(model)) is None:
        return {name: (name, tensor) for name, tensor in held.items()}
    return {name: (first, held.get(first, stages.whole[first])) for name, first in stages.names.items()}


def _match(
    model: nn.Module, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], file_name: Any, strict: bool
) -> tuple[dict[str, str], list[str], list[str]]:
    """({name in the model: name in the file}, missing, unexpected), with one name per tensor."""
    names: dict[int, list[str]] = {}
    tensors = {}
    for name, (_, tensor) in _everything(model, _named_tensors(model)).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    sources: dict[str, str] = {}
    missing: list[str] = []
    for key, aliases in names.items():
        found = [alias for alias in aliases if alias in shapes]
        if not found:
            missing += aliases
            if tensors[key].is_meta and stages_of(model) is None:
                raise ValueError(f"parameter {aliases[0]} is on the meta device and {file_name} does not have it")
            continue
        sources[aliases[0]] = found[0]
        if shapes[found[0]][0] != tuple(tensors[key].shape):
            raise ValueError(
                f"tensor {found[0]} has shape {shapes[found[0]][0]} in {file_name} and {tuple(tensors[key].shape)} in "
                "the model"
            )
    unexpected = sorted(set(shapes) - {alias for aliases in names.values() for alias in aliases})
    missing.sort()
    if strict and (missing or unexpected):
        raise ValueError(f"{file_name} does not match {type(model).__name__}: {unmatched(missing, unexpected)}")
    return sources, missing, unexpected


def _read(file_name: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    if not os.path.isfile(file_name):
        raise ValueError(f"file {file_name} does not exist")
    refuse_compressed(file_name)
    try:
        state = torch.load(file_name, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file_name))
    except Exception as error:  # torch raises many kinds of errors for a bad file; report the cause
        raise ValueError(
            f"{file_name} cannot be read as a state dict (only tensors are read, nothing is executed): "
            f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise ValueError(
            f"{file_name} holds a {type(state).__name__}, expected a state dict, a dict of tensors by name"
        )
    _check_values(state, file_name)
    return state


def _check_values(state: Mapping[str, torch.Tensor], file_name: str | os.PathLike[str]) -> None:
    """Raise ValueError for a value that is not a whole tensor: later, it would fail on rank 0 alone."""
    for name, tensor in state.items():
        if is_shard(tensor):
            raise ValueError(
                f"{file_name} holds only one rank's shard of {name}, as in state_dict() of a sharded model: write the "
                "model with engine.save, called on every rank"
            )
        if tensor.is_meta or tensor.layout is not torch.strided:
            kind = "is on the meta device and has no values" if tensor.is_meta else f"is a {tensor.layout} tensor"
            raise ValueError(f"tensor {name} in {file_name} {kind}, expected a dense one with its values")


def _write(state: OrderedDict[str, torch.Tensor], file_name: str | os.PathLike[str]) -> None:
    beside = f"{os.fspath(file_name)}.{os.getpid()}.part"
    _remove_abandoned(Path(file_name))
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, file_name)
    except BaseException:
        if os.path.exists(beside):
            os.remove(beside)
        raise


def _remove_abandoned(path: Path) -> None:
    """Remove leftovers of killed saves to this file. Saves in progress are recognised by their recent writes, as they
    may run on another machine, where neither the process nor every kind of lock is visible."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        with suppress(OSError):  # it was renamed meanwhile, or belongs to another user
            age = time.time() - left.stat().st_mtime
            if age > _ABANDONED and re.fullmatch(r"\.\d+\.part", left.name.removeprefix(path.name)):
                left.unlink()


def _finish() -> None:
    """Wait for the thread of an earlier ``save``; its error is raised on every rank. Collective."""
    global _writer
    with together("writing an earlier file"):
        writer, _writer = _writer, None
        if writer is not None:
            writer.finish()
