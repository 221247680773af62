"""Training checkpoints: model, optimizers, schedules, loss scale, random generators and the user's own state."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from engine import runtime
from engine.background import Background
from engine.checkpoint.files import MANIFEST, atomic_directory, checked_place
from engine.checkpoint.model import MODEL, filled_tensors, load_model, write_tensors
from engine.checkpoint.optimizer import OPTIM, collect_states, load_states, merge_stages
from engine.checkpoint.random_state import generator_states, reseed_generators, restore_generators
from engine.checkpoint.safe_pickle import dump, load
from engine.checkpoint.steps import clear_up, newest, path_of
from engine.collectives import from_rank_0, together
from engine.lockstep import watched
from engine.ops import zero_pages
from engine.optim.manager import OptimManager
from engine.parallel.mesh import device_mesh, once_per_world
from engine.parallel.pipeline.stages import gather_from_stages
from engine.tensors import local_tensor, with_local

STATE = "state"
_COMMON = "common.pt"
_PATIENCE = 1800.0  # seconds


@dataclass(frozen=True)
class _Contents:
    """Everything to write. For an asynchronous save, in memory that training does not change."""

    tensors: dict[str, dict[str, torch.Tensor]]  # by directory
    common: bytes  # the same for all ranks
    generators: bytes
    ready: Sequence[torch.cuda.Event] = ()  # after these, the copies are complete


@dataclass(frozen=True)
class _Job:
    """A checkpoint to write: its contents, its place, and how many earlier ones to keep."""

    path: Path
    contents: _Contents
    extra: Callable[[Path], None] | None
    step: int | None
    keep: int | None
    best: bool


def _start_writer(job: _Job, group: dist.ProcessGroup | None) -> Background:
    # A new thread uses GPU 0 by default, which would cost memory there for each rank.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    writer = Background(functools.partial(_write_later, job, group, device), f"checkpoint {job.path}")
    writer.start()
    return writer


def _write_later(job: _Job, group: dist.ProcessGroup | None, device: int | None) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
        for event in job.contents.ready:
            event.synchronize()
        _write(job, group)
    except Exception as error:
        if group is not None and not dist.is_initialized():
            raise RuntimeError(
                "the process group was destroyed before the checkpoint was written: call "
                "engine.wait_checkpoint() before destroy_process_group()"
            ) from error
        raise


_writer: Background | None = None  # the save in progress; at most one, so that collectives are made in order


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optim_manager: OptimManager | torch.optim.Optimizer | None = None,
    state: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    best: bool = False,
    asynchronous: bool = False,
    extra: Callable[[Path], None] | None = None,
) -> Path:
    """Write everything that training needs to continue, as a directory that is complete or absent. Collective.

    It contains the parameters and persistent buffers, the states and groups of the optimizers, schedules and loss scale
    (of an ``OptimManager``), each rank's random generators (Python's, NumPy's and torch's), and ``state``. It can be
    loaded on any mesh.

    Args:
        directory: the checkpoint, which may replace an existing checkpoint but nothing else; with ``step``, the
            directory of many. On a file system that all ranks share. Links are followed.
        state: the user's own state: numbers, strings, tensors, and lists, tuples and dicts of these. Rank 0's is saved.
        step: write to ``directory``/step-00000100.
        keep: with ``step``, how many complete checkpoints to keep, counted back from this step; older ones are removed,
            except for the best.
        best: with ``step``, make ``directory``/best name this checkpoint.
        asynchronous: return as soon as everything is copied to host memory, and write in a thread; later steps do not
            change what is written. A failure is logged, and raised by the next call of
            ``save_checkpoint``, ``load_checkpoint`` or ``wait_checkpoint``. A save waits for the previous one.
        extra: called on rank 0 with the directory under construction, to add files (configuration, tokenizer). The
            default is the model's ``write_texts``, if it has one, so that a model of modelcenter can be exported from
            the checkpoint alone; a function of your own may call that too. For a model from the Hub, the first save may
            ask the Hub which files its tokenizer has; ``extra=lambda path: None`` leaves all of this out.

    Returns:
        The checkpoint's path.

    Raises:
        ValueError: an argument is invalid, ``directory`` has other files or cannot be replaced (the current directory,
            a mount point), ``state`` holds something else, an optimizer holds parameters that are not the model's, or a
            parameter is on meta.
        RuntimeError or OSError: writing failed on a rank, or a rank was lost, which is named. Raised on every rank; an
            earlier checkpoint is unchanged.
    """
    wait_checkpoint()
    if step is None and (keep is not None or best):
        raise ValueError(
            f"{'keep' if keep is not None else 'best'} needs step=, which names one of several checkpoints"
        )
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ValueError(f"step is {step!r}, expected a whole number of at least 0")
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep is {keep!r}, expected a whole number of at least 1")
    path = Path(directory).absolute()
    path = path if step is None else path_of(path, step)
    contents = _collect(path, model, optim_manager, state, staged=asynchronous)
    job = _Job(path, contents, extra or getattr(model, "write_texts", None), step, keep, best)
    if not asynchronous:
        _write(job, None)
        return path
    global _writer
    _writer = _start_writer(job, _writers_group() if runtime.world_size() > 1 else None)
    return path


def wait_checkpoint() -> None:
    """Wait until an asynchronous save is on disk. Raises its error, if it failed, on every rank."""
    global _writer
    if _writer is not None:
        writer, _writer = _writer, None
        writer.finish()


@watched("engine.load_checkpoint")
def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optim_manager: OptimManager | torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    verify: bool = False,
    generators: bool = True,
) -> dict[str, Any]:
    """Restore model, optimizers, schedules, loss scale and random generators from a checkpoint. Collective.

    Each rank reads its own slices, on any mesh. On the mesh that saved the checkpoint, training continues bit for bit.
    On another mesh the random generators cannot be restored; they are seeded from the saved ones, in the same way at
    each load.

    Args:
        directory: a checkpoint, or a directory of many, of which the newest valid one is loaded.
        model, optim_manager: like those given to ``save_checkpoint``, newly built. Parameter groups must hold the same
            parameters; a saved optimizer may be left out (None).
        strict: see ``load_model``.
        verify: also compare the files' sha256, which reads them a second time.
        generators: restore the random generators.

    Returns:
        The ``state`` that was saved.

    Raises:
        ValueError: there is no valid checkpoint (each broken file is named), or it does not match model or optimizers.
        RuntimeError: a rank was lost, which is named.
    """
    wait_checkpoint()
    path, broken = newest(Path(directory).absolute(), verify)
    if path is None:
        why = "; ".join(broken) or f"it has neither {MANIFEST} nor a folder step-... with one"
        raise ValueError(f"{Path(directory).absolute()} holds no valid checkpoint: {why}")
    load_model(path, model, strict=strict)  # with `verify`, its hashes have just been compared
    if not from_rank_0(runtime.rank() == 0 and (path / STATE).is_dir()):
        if optim_manager is not None:
            raise ValueError(f"checkpoint {path} holds only a model, no optimizer: load it without optim_manager")
        return {}
    with together(f"reading {path}"):
        common = load(path / STATE / _COMMON)
        if optim_manager is not None:
            _check_kind(path, optim_manager, common["optim"])
    if optim_manager is not None:
        states = load_states(path, model, _optimizers(optim_manager), common["optim"]["optimizers"])
        with together(f"loading the optimizer of {path}"):
            if isinstance(optim_manager, OptimManager):
                optim_manager.load_state_dict({**common["optim"]["manager"], "optimizers": states})
            else:
                optim_manager.load_state_dict(states[0])
    if generators:
        with together(f"reading the random generators of {path}"):
            _restore_generators(path, common["mesh"])
    return common["state"]


def _check_kind(path: Path, optim_manager: OptimManager | torch.optim.Optimizer, saved: Any) -> None:
    if saved is None:
        raise ValueError(f"checkpoint {path} was saved without optim_manager: load it without one")
    if (saved["manager"] is None) != (not isinstance(optim_manager, OptimManager)):
        kinds = ("an optimizer alone", "an OptimManager")
        raise ValueError(
            f"checkpoint {path} was saved with {kinds[saved['manager'] is not None]}: load it with the same"
        )


@watched("engine.save_checkpoint")
def _collect(
    path: Path,
    model: nn.Module,
    optim_manager: OptimManager | torch.optim.Optimizer | None,
    state: Any,
    staged: bool,
) -> _Contents:
    """Everything that a checkpoint holds; with ``staged``, copied to host memory. Collective."""
    doing = f"collecting the state for {path}"
    optim: dict[str, Any] | None = None
    with together(doing):
        if runtime.rank() == 0:
            checked_place(path)
        tensors = {MODEL: filled_tensors(model)}
        if not isinstance(state, Mapping | None):
            raise ValueError(f"state is a {type(state).__name__}, expected a dict")
        if optim_manager is not None:
            held, optimizers = collect_states(model, _optimizers(optim_manager))
            manager = None
            if isinstance(optim_manager, OptimManager):
                manager = {k: v for k, v in optim_manager.state_dict().items() if k != "optimizers"}
    if optim_manager is not None:
        optim = {"manager": manager, "optimizers": merge_stages(model, optimizers)}
        if any(gather_from_stages(model, bool(held))):  # no states before the first step, nor on a frozen stage
            tensors[OPTIM] = held
    with together(doing):
        common = dump({"mesh": _mesh_sizes(), "optim": optim, "state": dict(state or {})})
        generators = dump(generator_states())
        ready: Sequence[torch.cuda.Event] = ()
        if staged:
            tensors, ready = _stage(tensors)
        return _Contents(tensors, common, generators, ready)


def _optimizers(given: OptimManager | torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return list(given.optimizers) if isinstance(given, OptimManager) else [given]


def _stage(
    tensors: dict[str, dict[str, torch.Tensor]],
) -> tuple[dict[str, dict[str, torch.Tensor]], list[torch.cuda.Event]]:
    """Copies in host memory, and the events after which they are complete."""
    local = (local_tensor(t) for members in tensors.values() for t in members.values())
    devices = {tensor.device for tensor in local if tensor.is_cuda}
    copies = {part: {name: _staged(t) for name, t in members.items()} for part, members in tensors.items()}
    # Later updates are queued on the same streams, so they cannot overtake the copies.
    return copies, [torch.cuda.current_stream(device).record_event() for device in devices]


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; from a GPU, it is still in progress when this returns."""
    local = local_tensor(tensor)
    if not local.is_cuda:
        return with_local(tensor, zero_pages.copy_of(local))
    copy = torch.empty_like(local, device="cpu", pin_memory=True)
    return with_local(tensor, copy.copy_(local, non_blocking=True))


@watched("engine.save_checkpoint")
def _write(job: _Job, group: dist.ProcessGroup | None) -> None:
    with atomic_directory(job.path, group) as path:
        for part, tensors in job.contents.tensors.items():
            write_tensors(path / part, tensors, group)
        with together(f"writing to {job.path}", group):
            (path / STATE).mkdir(exist_ok=True)
            _rank_file(path, runtime.rank()).write_bytes(job.contents.generators)
            if runtime.rank() == 0:
                (path / STATE / _COMMON).write_bytes(job.contents.common)
                if job.extra is not None:
                    job.extra(path)
    if job.step is not None:
        with together(f"clearing up in {job.path.parent}", group):
            if runtime.rank() == 0:
                clear_up(job.path.parent, job.step, job.step if job.best else None, job.keep)


@once_per_world
def _writers_group() -> dist.ProcessGroup:
    """A second group of all ranks for the writer's thread: its collectives must not mix with training's. Collective."""
    # If a rank's disk is slow, training continues meanwhile, so waiting costs less than losing the checkpoint.
    seconds = max(runtime.current().timeout, _PATIENCE)
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))


def _rank_file(path: Path, rank: int) -> Path:
    return path / STATE / f"rank-{rank:05d}.pt"


def _mesh_sizes() -> list[int]:
    return list(device_mesh().shape) if runtime.world_size() > 1 else [1]


def _restore_generators(path: Path, mesh: list[int]) -> None:
    if mesh == _mesh_sizes():
        restore_generators(load(_rank_file(path, runtime.rank())))
    else:
        reseed_generators(load(_rank_file(path, 0)))
