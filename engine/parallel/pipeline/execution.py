"""Pipeline parallelism: each stage of ranks has some of a model's units, and hidden states travel between stages.

A model takes part through one object, ``pipeline``, which tells its forward which units are this rank's and where the
hidden states come from; see ``Pipeline``. Every rank of a pipeline is given the same microbatches. So each stage
derives masks, positions and numbers of tokens from the integer inputs, and only hidden states (tokens, width) are sent,
in exactly the size of each microbatch. Whatever else a model computes from parameters, such as a position bias that all
blocks share, each stage computes from its own copy of these parameters; their gradients are summed.

``torch.distributed.pipelining`` has the same schedules, but its stages keep buffers of the first microbatch's shape,
split keyword arguments along dimension 0 (the wrong dimension of a mask or of ``cu_seqlens``), and know no tied
parameters. So the schedules are taken from there, and the execution is here.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from engine import runtime
from engine.collectives import first_difference
from engine.names import clean_name, model_tensors
from engine.notes import set_stages, stages_of
from engine.parallel.inputs import digest
from engine.parallel.pipeline.p2p import Neighbours, group_of
from engine.parallel.pipeline.schedule import split_units, stage_actions
from engine.parallel.pipeline.stages import Stages, remove_tensors
from engine.tensors import local_tensor

Shape = tuple[int, int]


class _OutputHandedOver(Exception):
    """Leaves the caller's code on a stage whose output goes to the next stage."""


@dataclass
class _PartialForward:
    """A forward of one part of the model that is in progress."""

    chunk: int
    first: bool
    last: bool
    given: list[Tensor] = field(default_factory=list)
    output: list[Tensor] = field(default_factory=list)


@dataclass
class Reached:
    """What the backward of one part of the model reaches.

    Attributes:
        units: FSDP's modules in the units of the part. root: the model itself, if FSDP shards it.
        uses_root: whether this part of the model uses parameters outside of the units.
    """

    units: list[FSDPModule]
    root: list[FSDPModule]
    uses_root: bool


class Pipeline(Stages):
    """This rank's part of a model that follows the protocol, and its links to the neighbouring stages.

    Attributes:
        chunks: number of parts of the model that each stage has.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, chunks: int) -> None:
        super().__init__(model, mesh)
        self.chunks = chunks
        self.dtype = torch.float32  # of the hidden states that are sent; the policy says it once the model is sharded
        units = len(model.units)  # type: ignore[arg-type]
        self._parts = split_units(units, self.size * chunks)
        stage = {unit: part % self.size for part, mine in enumerate(self._parts) for unit in mine}
        said = model.stage_homes()  # type: ignore[operator]
        _check_homes(model, said)
        #: {module outside of the units: the stages that have it}
        self.homes = {name: sorted({stage[unit] for unit in at}) for name, at in said.items()}
        self._with_others = {unit for at in said.values() for unit in at}
        # Not those that all units read, nor units that several stages run. A tied table does not count as read by all
        # units, even if there are only two units and both are its homes.
        run = set(model.units)  # type: ignore[arg-type]
        begin = [name for name, at in said.items() if 0 in at and at != range(units)]
        self._begin = [name for name in begin if model.get_submodule(name) not in run]
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        self._elements = sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
        self._neighbours = Neighbours(mesh, chunks)
        # {parameter that several stages have: their group}. All ranks make all groups, in the same order.
        self._shared: dict[str, dist.ProcessGroup] = {}
        for name, _ in model_tensors(model):
            at = next((at for module, at in self.homes.items() if name.startswith(f"{module}.")), [0])
            group = group_of(mesh, tuple(at)) if len(at) > 1 else None
            if group is not None and self.rank in at:
                self._shared[name] = group
                self.copies |= {name} if self.rank != at[0] else set()
        self._turn: _PartialForward | None = None

    # -- for the model's forward ---------------------------------------------------------------------------------------

    @property
    def first(self) -> bool:
        """Whether this forward starts from tokens."""
        return self._now().first

    @property
    def last(self) -> bool:
        """Whether this forward ends with the model's output."""
        return self._now().last

    @property
    def part(self) -> range:
        """Indices of the model's units that this forward runs."""
        return self._parts[self._now().chunk * self.size + self.rank]

    @property
    def leaves(self) -> bool:
        """Whether this rank has no other part of the model to run after this one."""
        return self._now().chunk == self.chunks - 1

    def context(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """The context that ``model.begin`` makes of a batch, with zeros from modules that not every stage has.

        Raises ValueError if the context depends on what these modules compute.
        """
        zeros: list[Tensor] = []
        hidden = [(model.get_submodule(owner), name) for owner, _, name in (n.rpartition(".") for n in self._begin)]
        for owner, name in hidden:  # an attribute hides the module of the same name
            owner.__dict__[name] = _Blank(zeros, self.dtype)
        try:
            with torch.enable_grad():  # to find what depends on the zeros
                _, ctx = model.begin(batch)  # type: ignore[operator]
        finally:
            for owner, name in hidden:
                owner.__dict__.pop(name)
        if any(isinstance(x, Tensor) and _depends(x, zeros) for x in tree_leaves(vars(ctx))):
            raise ValueError(
                f"{type(model).__name__} cannot be split into stages: its begin computes more than the first hidden "
                f"states from its parameters ({', '.join(self._begin)}), which other stages do not have; stage_homes "
                "can place such a module on every stage"
            )
        return ctx

    def receive(self, shapes: Sequence[Shape]) -> list[Tensor]:
        """The hidden states, of these (rows, width), that the previous stage has handed over."""
        given = self._now().given
        for shape in shapes:
            x = torch.empty(shape, dtype=self.dtype, device=runtime.device())
            self._neighbours.receive(x, forward=True)
            given.append(x.requires_grad_(torch.is_grad_enabled()))
        return given

    def hand_over(self, states: Sequence[Tensor], shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        """Hand hidden states of these shapes to the next stage. Returns what the model's forward has to return."""
        for x, shape in zip(states, shapes, strict=True):
            if tuple(x.shape) != shape or x.dtype != self.dtype:
                raise RuntimeError(
                    f"stage {self.rank} made hidden states of shape {tuple(x.shape)} and dtype {x.dtype}, but the next "
                    f"one expects {shape} and {self.dtype}: a unit must return what it is given"
                )
        self._now().output = list(states)
        return tuple(states)  # where FSDP's hooks find them

    def _now(self) -> _PartialForward:
        if self._turn is None:
            raise ValueError(
                f"this model is split into {self.size * self.chunks} parts over the ranks of a pipeline "
                f"(pp_size={self.size}), so no rank can call it alone: use engine.accumulate or "
                "modelcenter.training.accumulate to train, modelcenter.training.evaluate to evaluate, generate to "
                "generate text"
            )
        return self._turn

    def watch(self, model: nn.Module) -> None:
        """Reject calls from outside, and leave the caller's code on stages without the output. After FSDP's hooks."""

        def end(*_: Any) -> None:
            if not self._now().last:
                raise _OutputHandedOver

        model.register_forward_pre_hook(lambda *_: self._now() and None, prepend=True)
        model.register_forward_hook(end)

    # -- for accumulate and evaluate -----------------------------------------------------------------------------------

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Elements of the parameters of the whole model."""
        return self._elements[only_trainable]

    def round_up(self, microbatches: int) -> int:
        """``microbatches`` rounded up to a number that the schedule can run."""
        return microbatches if self.chunks == 1 else -(-microbatches // self.size) * self.size

    def check_same(self, batches: Sequence[Any]) -> None:
        """Raise ValueError if the ranks of this pipeline were given different microbatches. Collective."""
        mine = zlib.crc32(repr([digest(batch) for batch in batches]).encode())
        other = first_difference(mine, self.mesh["pp"].get_group())
        if other is not None:
            raise ValueError(
                f"rank {runtime.rank()} and stage {other} of its pipeline (pp_size={self.size}) were given different "
                "microbatches (in generation: different rows or settings): split the data by engine.data_rank() and "
                "engine.data_size(), not by rank and world size"
            )

    def train(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Callable[[Any, int], Tensor],
        backward: Callable[[Tensor], None],
        before_backward: Callable[[int, Reached], None],
    ) -> Tensor:
        """Run forward and backward of all microbatches. Returns the sum of their losses; 0 except on the last stage.

        Call it after ``take_shared_gradients`` and before ``sum_shared_gradients``.

        Args:
            forward: ``forward(microbatch, number)`` calls ``model`` and returns the loss.
            backward: called with the loss, on the last stage.
            before_backward: called before each backward with the number of its microbatch, and what it reaches.

        Raises RuntimeError, as ``forward`` does, if an exception interrupted an earlier step.
        """
        total = torch.zeros((), dtype=torch.float32, device=runtime.device())
        flight: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        reached = [self._reached(model, chunk) for chunk in range(self.chunks)]
        with self._neighbours.step():
            for is_forward, chunk, number in stage_actions(self.rank, self.size, self.chunks, len(batches)):
                if is_forward:
                    turn, loss = self._forward(chunk, functools.partial(forward, batches[number], number))
                    if loss is not None:
                        total += loss.detach().float()
                    flight[chunk, number] = turn.given, turn.output if loss is None else [loss]
                    continue
                given, output = flight.pop((chunk, number))
                before_backward(number, reached[chunk])
                if self._is_end(chunk):
                    backward(output[0])
                else:
                    self._backward_from(output)
                gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in given]
                self._neighbours.send(*gradients, forward=False)
            self.flush()
        return total

    def forward(self, call: Callable[[], Any]) -> Any:
        """Run ``call``, which calls the model once, without gradients. Its value on the last stage, None elsewhere."""
        value = None
        with self._neighbours.step():
            for chunk in range(self.chunks):
                _, value = self._forward(chunk, call)
        return value

    def from_last(self, x: Tensor) -> Tensor:
        """The last stage's ``x`` on all stages, which pass tensors of the same shape and dtype. Collective."""
        x = x.contiguous()
        dist.broadcast(x, group=self.mesh["pp"].get_group(), group_src=self.size - 1)
        return x

    def flush(self) -> None:
        """Wait until everything handed over has been sent."""
        self._neighbours.flush()

    def _backward_from(self, output: list[Tensor]) -> None:
        """Run backward from the tensors that were handed over, with the gradients that the next stage returns."""
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in output]
        for gradient in gradients:
            self._neighbours.receive(gradient, forward=False)
        used = [x.requires_grad for x in output]
        if any(used):
            torch.autograd.backward([*compress(output, used)], [*compress(gradients, used)])

    def _forward(self, chunk: int, call: Callable[[], Any]) -> tuple[_PartialForward, Any]:
        turn = self._turn = _PartialForward(chunk, chunk == 0 and self.rank == 0, self._is_end(chunk))
        try:
            value = call()
        except _OutputHandedOver:
            value = None
        finally:
            self._turn = None
        if not turn.last:
            if not turn.output:
                raise RuntimeError("the forward of a microbatch did not call the model that it was given with")
            self._neighbours.send(*(x.detach() for x in turn.output), forward=True)
        return turn, value

    def _is_end(self, chunk: int) -> bool:
        return chunk == self.chunks - 1 and self.rank == self.size - 1

    def _reached(self, model: nn.Module, chunk: int) -> Reached:
        part = self._parts[chunk * self.size + self.rank]
        units = [list(model.units)[i] for i in part]  # type: ignore[arg-type]
        return Reached(
            units=[m for unit in units for m in unit.modules() if isinstance(m, FSDPModule)],
            root=[model] if isinstance(model, FSDPModule) else [],
            uses_root=not self._with_others.isdisjoint(part),
        )

    # -- shared parameters ---------------------------------------------------------------------------------------------

    def _shared_parameters(self, model: nn.Module) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        named = [(p, self._shared.get(clean_name(n))) for n, p in model.named_parameters() if p.requires_grad]
        return [(p, group) for p, group in named if group is not None]

    def take_shared_gradients(self, model: nn.Module) -> list[Tensor | None]:
        """Remove and return earlier gradients of shared parameters, which are already summed over the stages."""
        held = []
        for parameter, _ in self._shared_parameters(model):
            held.append(parameter.grad)
            parameter.grad = None
        return held

    @torch.no_grad()
    def sum_shared_gradients(self, model: nn.Module, held: list[Tensor | None]) -> None:
        """Sum the gradients of parameters that several stages use, in the model's order, and add those from before."""
        for (parameter, group), before in zip(self._shared_parameters(model), held, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_tensor(parameter.grad)
            if gradient.numel():
                gradient = gradient.contiguous()
                dist.all_reduce(gradient, group=group)
                local_tensor(parameter.grad).copy_(gradient)
            if before is not None:
                parameter.grad += before


class _Blank(nn.Module):
    """Stands in for an embedding, or for a module applied to one, that this stage lacks."""

    def __init__(self, zeros: list[Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._zeros = zeros  # all that were made
        self._dtype = dtype  # of hidden states: a model makes biases and rotations in it, for all its layers

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.is_floating_point():
            return x
        self._zeros.append(x.new_zeros(*x.shape, 1, dtype=self._dtype).requires_grad_())
        return self._zeros[-1]


def _check_homes(model: nn.Module, said: Iterable[str]) -> None:
    units: Any = model.units
    kept = {p for module in (*units, *map(model.get_submodule, said)) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter not in kept:
            raise ValueError(
                f"{type(model).__name__} cannot be split into stages: {clean_name(name)} is in no unit, and in no "
                "module that stage_homes names, so each stage would train its own copy; put it into a module, or use "
                "pp_size=1"
            )


def _depends(x: Tensor, leaves: Iterable[Tensor]) -> bool:
    """Whether x was computed from one of them."""
    looked_for = {id(leaf) for leaf in leaves}
    left, seen = [x.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in looked_for:
            return True
        left += [before for before, _ in node.next_functions]
    return id(x) in looked_for


def split_into_stages(model: nn.Module, mesh: DeviceMesh, chunks: int) -> None:
    """Leave this rank's stage of ``model``, in place; on meta too.

    Modules of other stages stay in their places, without parameters and buffers, so that no name changes.

    Raises ValueError if the model does not follow the protocol, or has fewer units than there are stages.
    """
    stages = mesh["pp"].size() * chunks
    units = getattr(model, "units", None)
    if not hasattr(model, "pipeline") or not isinstance(units, nn.ModuleList):
        raise ValueError(
            f"pp_size is {mesh['pp'].size()}, but {type(model).__name__} cannot be split into stages: it needs begin, "
            "units, end, and an attribute pipeline. Use pp_size=1, or put its blocks into a "
            "PipelineTransformerBlockList"
        )
    if len(units) < stages:
        raise ValueError(
            f"{type(model).__name__} has {len(units)} units, fewer than the {stages} parts of the pipeline "
            f"(pp_size={mesh['pp'].size()}, pp_chunks={chunks}): use fewer parts"
        )
    pipeline = Pipeline(model, mesh, chunks)
    # On every rank, before anything travels.
    empty = model.empty_batch().items()  # type: ignore[operator]
    pipeline.context(model, {n: torch.zeros_like(x, device="cpu") if _on_meta(x) else x for n, x in empty})
    mine = {units[i] for chunk in range(chunks) for i in pipeline._parts[chunk * pipeline.size + pipeline.rank]}
    for unit in units:
        if unit not in mine:
            remove_tensors(unit)
    for name, at in pipeline.homes.items():
        if pipeline.rank not in at:
            remove_tensors(model.get_submodule(name))
    model.pipeline = pipeline  # type: ignore[assignment]
    set_stages(model, pipeline)


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """The ``Pipeline`` that ``split_into_stages`` gave the model, if any."""
    found = stages_of(model)
    return found if isinstance(found, Pipeline) else None


def _on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
