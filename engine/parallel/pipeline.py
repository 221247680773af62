"""Pipeline parallelism: each stage of ranks has some of a model's units, and hidden states travel between stages.

A model takes part through one object, ``pipeline``, which its forward asks which units are this rank's and where the
hidden states come from; see ``Pipeline``. Every rank of a pipeline is given the same microbatches, so masks, positions
and numbers of tokens are made again on each stage from the integer inputs, and only hidden states (tokens, width) are
sent: of exactly the size that each microbatch has.

``torch.distributed.pipelining`` has the same schedules, but its stages keep buffers of the first microbatch's shape,
cut keyword arguments along dimension 0 (which cuts a mask or ``cu_seqlens`` in the wrong place), and know no tied
parameters. So the order of the work is theirs and what is done in it is here.
"""

from __future__ import annotations

import datetime
import functools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from engine import runtime
from engine.init import clean_name
from engine.parallel.tensor import digest
from engine.torch_compat import all_gather_flat, local_tensor

Action = tuple[bool, int, int]  # forward, part of the model, microbatch
_ABSENT = "_engine_absent"
_PLACE = "_engine_stage"
_STAGES = "_engine_stages"


def order(rank: int, size: int, chunks: int, microbatches: int) -> list[Action]:
    """What stage ``rank`` of ``size`` does, one after the other, where each stage has ``chunks`` parts of the model.

    One part: 1F1B (Narayanan et al. 2019, arXiv:1806.03377). Several: interleaved 1F1B (Narayanan et al. 2021,
    arXiv:2104.04473), for which ``microbatches`` is a multiple of ``size``.
    """
    assert chunks == 1 or microbatches % size == 0
    total = chunks * microbatches
    ahead = size - rank - 1 if chunks == 1 else 2 * (size - rank - 1) + (chunks - 1) * size
    ahead = min(total, ahead)

    def action(forward: bool, k: int) -> Action:
        if chunks == 1:
            return forward, 0, k
        chunk = k // size % chunks
        return forward, chunk if forward else chunks - 1 - chunk, k // (size * chunks) * size + k % size

    done = [action(True, k) for k in range(ahead)]
    for k in range(total - ahead):
        done += [action(True, ahead + k), action(False, k)]
    return done + [action(False, k) for k in range(total - ahead, total)]


def parts(units: int, stages: int) -> list[range]:
    """The units of each stage: as equal as can be, the first ones longer."""
    short, longer = divmod(units, stages)
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + short + (stage < longer))
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


class _HandedOver(Exception):
    """Ends a caller's code around a model whose output is with the next stage."""


@dataclass
class _Turn:
    """A forward of one part of the model that is under way."""

    chunk: int
    first: bool
    last: bool
    given: Tensor | None = None
    output: Tensor | None = None


class Stages:
    """What a model was before this rank's stage was left of it.

    Attributes:
        rank, size: of the stage.
        whole: {name: meta tensor} of all parameters and persistent buffers of the model, in its order.
        parameters: names of the parameters.
        spread: names of those that the stages have different ones of. copies: names among them that this stage holds
            too but another one owns: the table of a tied head.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank, self.size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self.whole = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in _stored(model)}
        self.parameters = [clean_name(name) for name, _ in model.named_parameters()]
        self.spread, self.copies = set(self.whole), set[str]()
        self._names: list[set[str]] = []

    def holders(self, names: Iterable[str]) -> list[set[str]]:
        """The names that each stage holds; asked once. Collective."""
        if not self._names:
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, set(names), group=self.mesh["pp"].get_group())
            self._names = found
        return self._names


class Neighbours:
    """The stages before and after this rank's, in a ring. Made by all ranks at once."""

    def __init__(self, mesh: DeviceMesh, ring: bool = False) -> None:
        self._rank, self._size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self._channels = _groups(mesh, dist.group.WORLD, ring)
        self._sends: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor, forward: bool) -> None:
        """Start to send ``x`` to the next stage, or back to the one before."""
        # Of what has left nothing is held.
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()[0].wait()
        if x.numel():
            x = x.contiguous()
            to = (self._rank + (1 if forward else -1)) % self._size
            wraps = self._rank == (self._size - 1 if forward else 0)
            self._sends.append((dist.isend(x, group=self._channel(forward, wraps), group_dst=to), x))

    def receive(self, x: Tensor, forward: bool) -> None:
        """Fill ``x`` with what the stage before, or the next one, sent."""
        if x.numel():
            source = (self._rank - (1 if forward else -1)) % self._size
            wraps = self._rank == (0 if forward else self._size - 1)
            work = dist.irecv(x, group=self._channel(forward, wraps), group_src=source)
            assert work is not None
            work.wait()

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _channel(self, forward: bool, wraps: bool) -> dist.ProcessGroup:
        # Whatever goes from one rank to another in one group comes in the order it was sent. Each of the four kinds has
        # a group of its own, because stages do not alternate between them in the same order.
        return self._channels[2 * wraps + forward]


class Pipeline(Stages):
    """This rank's part of a model that follows the protocol, and the way to its neighbours.

    Attributes:
        chunks: parts of the model that each stage has.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, chunks: int) -> None:
        super().__init__(model, mesh)
        self.chunks = chunks
        self.dtype: torch.dtype | None = None  # of hidden states on the way
        begin, end = _ends(model)
        self._begin, self._parts = begin, parts(len(model.units), self.size * chunks)  # type: ignore[arg-type]
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        self._elements = sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
        shared = {name for name, _ in _stored(model) if name.startswith(tuple(f"{m}." for m in {*begin} & {*end}))}
        self.copies = shared if self.rank == self.size - 1 else set()
        self.shared = shared if self.rank in (0, self.size - 1) else set()
        self._neighbours = Neighbours(mesh, ring=chunks > 1)
        self._both_ends = _both_ends(mesh, dist.group.WORLD) if shared else None
        self._turn: _Turn | None = None

    # -- what a model asks in its forward ------------------------------------------------------------------------------

    @property
    def first(self) -> bool:
        """Whether this forward starts from tokens."""
        return self._now().first

    @property
    def last(self) -> bool:
        """Whether this forward ends with the model's output."""
        return self._now().last

    def units(self, units: Sequence[nn.Module]) -> list[nn.Module]:
        """Those of the model's units that this forward runs."""
        return [units[i] for i in self._parts[self._now().chunk * self.size + self.rank]]

    def context(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """What ``begin`` makes of a batch besides hidden states; its modules are replaced by ones that give zeros.

        Raises ValueError if that depends on what its modules compute.
        """
        # An attribute hides the module of the same name.
        model.__dict__.update({name: _Blank() for name in self._begin})
        try:
            with torch.enable_grad():  # which shows what depends on the zeros
                _, ctx = model.begin(batch)  # type: ignore[operator]
        finally:
            for name in self._begin:
                model.__dict__.pop(name)
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(vars(ctx))):
            raise ValueError(
                f"{type(model).__name__} cannot be split into stages: its begin computes more than the first hidden "
                f"states from its parameters ({', '.join(self._begin)}), and other stages have none of them"
            )
        return ctx

    def receive(self, rows: int, width: int) -> Tensor:
        """The hidden states (rows, width) that the stage before this one handed over."""
        x = torch.empty(rows, width, dtype=self.dtype, device=runtime.device())
        self._neighbours.receive(x, forward=True)
        self._now().given = x.requires_grad_(torch.is_grad_enabled())
        return x

    def hand_over(self, x: Tensor, rows: int, width: int) -> tuple[Tensor]:
        """Leave the hidden states to the next stage; what the model's forward returns."""
        if tuple(x.shape) != (rows, width) or x.dtype != self.dtype:
            raise RuntimeError(
                f"stage {self.rank} made hidden states of shape {tuple(x.shape)} and dtype {x.dtype}, but the next one "
                f"expects ({rows}, {width}) and {self.dtype}: a unit must return what it is given"
            )
        self._now().output = x
        return (x,)  # so that FSDP's hooks see it

    def _now(self) -> _Turn:
        if self._turn is None:
            raise ValueError(
                f"this model is split into {self.size * self.chunks} parts over the ranks of a pipeline (pp_size="
                f"{self.size}), so no rank can call it alone: use engine.accumulate or modelcenter.training.accumulate "
                "to train, modelcenter.training.evaluate to evaluate"
            )
        return self._turn

    def watch(self, model: nn.Module) -> None:
        """Refuse calls from outside, and end the caller's code where the output is not here. After FSDP's hooks."""

        def end(*_: Any) -> None:
            if not self._now().last:
                raise _HandedOver

        model.register_forward_pre_hook(lambda *_: self._now() and None, prepend=True)
        model.register_forward_hook(end)

    # -- what accumulate and evaluate ask ------------------------------------------------------------------------------

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Elements of the parameters of the whole model."""
        return self._elements[only_trainable]

    def rounded(self, microbatches: int) -> int:
        """The number of microbatches that the schedule needs for so many."""
        return microbatches if self.chunks == 1 else -(-microbatches // self.size) * self.size

    def check_same(self, batches: Sequence[Any]) -> None:
        """Raises ValueError if a rank of this pipeline was given other microbatches."""
        mine = zlib.crc32(repr([digest(batch) for batch in batches]).encode())
        group = self.mesh["pp"].get_group()
        on = runtime.message_device(group)
        table = torch.empty(self.size, dtype=torch.int64, device=on)
        all_gather_flat(table, torch.tensor([mine], device=on), group)
        if not bool((table == mine).all()):
            other = int((table != mine).nonzero()[0])
            raise ValueError(
                f"rank {runtime.rank()} and stage {other} of its pipeline (pp_size={self.size}) were given other "
                "microbatches: split the data by engine.data_rank() and engine.data_size(), not by rank and world size"
            )

    def train(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Callable[[Any, int], Tensor],
        backward: Callable[[Tensor], None],
        set_last: Callable[[bool, list[FSDPModule]], None],
    ) -> Tensor:
        """Forward and backward of all microbatches; the sum of their losses, 0 except on the last stage.

        Args:
            forward: makes the loss of (microbatch, its number), by a call of ``model``.
            backward: of the loss, on the last stage.
            set_last: told before each backward whether it is the last one of these modules.
        """
        held = self._set_aside(model)
        total = torch.zeros((), dtype=torch.float32, device=runtime.device())
        flight: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        modules = [self._modules(model, chunk) for chunk in range(self.chunks)]
        for is_forward, chunk, number in order(self.rank, self.size, self.chunks, len(batches)):
            if is_forward:
                turn, loss = self._forward(chunk, functools.partial(forward, batches[number], number))
                if loss is not None:
                    total += loss.detach().float()
                output = turn.output if loss is None else loss
                assert output is not None
                flight[chunk, number] = turn.given, output
                continue
            given, output = flight.pop((chunk, number))
            set_last(number == len(batches) - 1, modules[chunk])
            if self._is_end(chunk):
                backward(output)
            else:
                gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
                self._neighbours.receive(gradient, forward=False)
                if output.requires_grad:
                    torch.autograd.backward(output, gradient)
            if given is not None:
                self._neighbours.send(torch.zeros_like(given) if given.grad is None else given.grad, forward=False)
        self.flush()
        self._sum_shared(model, held)
        return total

    def forward(self, call: Callable[[], Any]) -> Any:
        """The value of ``call``, which calls the model once, on the last stage; None on the others. No gradients."""
        value = None
        for chunk in range(self.chunks):
            _, value = self._forward(chunk, call)
        return value

    def flush(self) -> None:
        """Wait until what was handed over has left."""
        self._neighbours.flush()

    def _forward(self, chunk: int, call: Callable[[], Any]) -> tuple[_Turn, Any]:
        turn = self._turn = _Turn(chunk, chunk == 0 and self.rank == 0, self._is_end(chunk))
        try:
            value = call()
        except _HandedOver:
            value = None
        finally:
            self._turn = None
        if not turn.last:
            if turn.output is None:
                raise RuntimeError("the forward of a microbatch did not call the model that it was given with")
            self._neighbours.send(turn.output.detach(), forward=True)
        return turn, value

    def _is_end(self, chunk: int) -> bool:
        return chunk == self.chunks - 1 and self.rank == self.size - 1

    def _modules(self, model: nn.Module, chunk: int) -> list[FSDPModule]:
        units = [list(model.units)[i] for i in self._parts[chunk * self.size + self.rank]]  # type: ignore[arg-type]
        inside = [m for unit in units for m in unit.modules() if isinstance(m, FSDPModule)]
        return [model, *inside] if isinstance(model, FSDPModule) else inside

    # -- shared parameters ---------------------------------------------------------------------------------------------

    def _shared_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return [p for n, p in model.named_parameters() if clean_name(n) in self.shared and p.requires_grad]

    def _set_aside(self, model: nn.Module) -> list[Tensor | None]:
        """The gradients from before, which are sums over the stages already."""
        held = []
        for parameter in self._shared_parameters(model):
            held.append(parameter.grad)
            parameter.grad = None
        return held

    @torch.no_grad()
    def _sum_shared(self, model: nn.Module, held: list[Tensor | None]) -> None:
        """Sum the gradients of parameters that the first and the last stage both use."""
        for parameter, before in zip(self._shared_parameters(model), held, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_tensor(parameter.grad)
            if gradient.numel():
                gradient = gradient.contiguous()
                dist.all_reduce(gradient, group=self._both_ends)
                local_tensor(parameter.grad).copy_(gradient)
            if before is not None:
                parameter.grad += before


class _Blank(nn.Module):
    """In place of an embedding, or of what is done to one."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if x.is_floating_point() else x.new_zeros(*x.shape, 1, dtype=torch.float32).requires_grad_()


def split(model: nn.Module, mesh: DeviceMesh, chunks: int) -> None:
    """Leave this rank's stage of ``model``, in place; on meta too.

    Modules of other stages stay in their places, without parameters and buffers, so that no name changes.

    Raises ValueError if the model does not follow the protocol, or has fewer units than there are stages.
    """
    stages = mesh["pp"].size() * chunks
    units = getattr(model, "units", None)
    able = getattr(model, "splits_into_stages", True)
    if not able or not hasattr(model, "pipeline") or not isinstance(units, nn.ModuleList):
        raise ValueError(
            f"pp_size is {mesh['pp'].size()}, but {type(model).__name__} cannot be split into stages: it needs begin, "
            "one list of units, end, and an attribute pipeline. Use pp_size=1, or put its blocks into a "
            "PipelineTransformerBlockList"
        )
    if len(units) < stages:
        raise ValueError(
            f"{type(model).__name__} has {len(units)} units, which are fewer than the {stages} parts of the pipeline "
            f"(pp_size={mesh['pp'].size()}, pp_chunks={chunks}): use fewer"
        )
    pipeline = Pipeline(model, mesh, chunks)
    # On every rank, before anything travels.
    empty = model.empty_batch().items()  # type: ignore[operator]
    pipeline.context(model, {n: torch.zeros_like(x, device="cpu") if _on_meta(x) else x for n, x in empty})
    mine = {i for chunk in range(chunks) for i in pipeline._parts[chunk * pipeline.size + pipeline.rank]}
    for index, unit in enumerate(units):
        if index not in mine:
            _hollow(unit)
    begin, end = _ends(model)
    kept = {*(begin if pipeline.rank == 0 else ()), *(end if pipeline.rank == pipeline.size - 1 else ())}
    for name in {*begin, *end} - kept:
        _hollow(model.get_submodule(name))
    model.pipeline = pipeline  # type: ignore[assignment]
    set_stages(model, pipeline)


def split_lists(model: nn.Module, lists: Iterable[nn.ModuleList], mesh: DeviceMesh) -> None:
    """Leave this rank's stage of each of ``lists``, and of the rest of ``model`` all, in place; on meta too."""
    stages = Stages(model, mesh)
    stages.spread = set()
    Neighbours(mesh)  # made here by all ranks at once, used in forward
    names = {module: name for name, module in model.named_modules()}
    for blocks in lists:
        for stage, part in enumerate(parts(len(blocks), stages.size)):
            for index in part:
                prefix = clean_name(names[blocks[index]]) + "."
                stages.spread |= {name for name in stages.whole if name.startswith(prefix)}
                if stage != stages.rank:
                    _hollow(blocks[index])
    set_stages(model, stages)


def set_stages(model: nn.Module, stages: Stages) -> None:
    """Note that ``model`` has been left one stage of ``stages``."""
    model.__dict__[_STAGES] = stages


def stages_of(model: nn.Module) -> Stages | None:
    """What ``model`` was before one stage was left of it; None: it is whole."""
    return model.__dict__.get(_STAGES)


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """What ``split`` gave the model, if it did."""
    found = stages_of(model)
    return found if isinstance(found, Pipeline) else None


def is_absent(module: nn.Module) -> bool:
    """Whether the module is on another stage."""
    return getattr(module, _ABSENT, False)


def absent_names(model: nn.Module) -> set[str]:
    """Names of modules, and of their parameters, that are on other stages."""
    return elsewhere(model) | {clean_name(name) for name, m in model.named_modules() if is_absent(m)}


def elsewhere(model: nn.Module) -> set[str]:
    """Names of parameters and persistent buffers that other stages hold and this one does not."""
    if (stages := stages_of(model)) is None:
        return set()
    return set(stages.whole) - {name for name, _ in _stored(model)}


def mark(model: nn.Module) -> None:
    """Note on each parameter that the stages have different ones, and which of them are copies: for ``grad_norm``."""
    if (stages := stages_of(model)) is not None:
        for name, parameter in model.named_parameters():
            if clean_name(name) in stages.spread:
                setattr(parameter, _PLACE, "copy" if clean_name(name) in stages.copies else "own")


def place_of(parameter: Tensor) -> str | None:
    """ "own": other stages do not have this parameter; "copy": this stage's copy of another's; None: all have it."""
    return getattr(parameter, _PLACE, None)


def of_all_stages(model: nn.Module, value: Any) -> list[Any]:
    """``value`` of each stage, by pickle; collective where ``model`` is split. Without a split: [value]."""
    if (stages := stages_of(model)) is None:
        return [value]
    found: list[Any] = [None] * stages.size
    dist.all_gather_object(found, value, group=stages.mesh["pp"].get_group())
    return found


@torch.no_grad()
def whole_tensor(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    """One tensor of ``model``, whole, on rank 0 at least; collective, None where it did not come by.

    Args:
        tensors: what this rank holds of the model, by name.
    """
    stages, held = stages_of(model), tensors.get(name)
    full = held.full_tensor() if isinstance(held, DTensor) else held
    if stages is None:
        return full
    owner = next(stage for stage, names in enumerate(stages.holders(tensors)) if name in names)
    if owner == 0 or runtime.rank() % (runtime.world_size() // stages.size):
        return full  # the ranks in line with rank 0 hand it on
    group = stages.mesh["pp"].get_group()
    if stages.rank == owner:
        assert full is not None
        dist.send(full.contiguous(), group=group, group_dst=0)
    elif stages.rank == 0:
        full = torch.empty_like(stages.whole[name], device=runtime.device())
        dist.recv(full, group=group, group_src=owner)
    return full


def _ends(model: nn.Module) -> tuple[list[str], list[str]]:
    begin, end = model.stage_ends()  # type: ignore[operator]
    return list(begin), list(end)


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


def _on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _hollow(module: nn.Module) -> None:
    for inner in module.modules():
        for tensors in (inner._parameters, inner._buffers):
            tensors.update(dict.fromkeys(tensors))
        setattr(inner, _ABSENT, True)


def _lines(mesh: DeviceMesh) -> list[list[int]]:
    """The ranks of each pipeline, from the first stage to the last."""
    return mesh.mesh.reshape(mesh["pp"].size(), -1).t().tolist()


@functools.cache
def _groups(mesh: DeviceMesh, world: dist.ProcessGroup, wraps: bool) -> list[dist.ProcessGroup]:
    """Groups of this rank's pipeline: backward, forward, and both for what goes around. Collective."""
    return [_line_group(_lines(mesh)) for _ in range(4 if wraps else 2)]


@functools.cache
def _both_ends(mesh: DeviceMesh, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """The first and the last stage of this rank's pipeline; on other stages any group. Collective."""
    return mesh["pp"].get_group() if mesh["pp"].size() == 2 else _line_group([[r[0], r[-1]] for r in _lines(mesh)])


def _line_group(lines: list[list[int]]) -> dist.ProcessGroup:
    timeout = datetime.timedelta(seconds=runtime.current().timeout)
    mine, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
    return mine
