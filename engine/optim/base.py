"""What optimizers with a fused step share: states placed like the shards, fp32 masters of 16-bit parameters, the step
itself, and loading."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from engine.notes import ROUNDING_KEY, ROUNDS_AT_RANDOM
from engine.ops import fused
from engine.ops.compilation import outside_graphs
from engine.ops.library import FLOATS
from engine.optim.batch import Batch, in_memory_as, mode_of, same_objects
from engine.optim.moments import zero_moment
from engine.optim.rounding import place_of
from engine.optim.states import (
    OwnStates,
    as_adamw_state,
    check_group,
    check_states,
    is_number,
    placed_alike,
    placed_as,
    placed_gradient,
    saved_states,
    scalar_on,
    sparse_gradient,
    undone_on_error,
    whole_states,
    with_parts,
    with_strides_of,
)
from engine.tensors import gradients_of, local_tensor, local_tensors, with_local

MASTERS = ("fp32", "remainder")
# What a state may have besides its moments.
_OPTIONAL_STATES = ("master", "remainder", "exp_avg_scale", "exp_avg_sq_scale")
# With many small parameters, inspecting them dominates a step: these serve ``map``, without Python code per parameter.
_dtype = operator.attrgetter("dtype")
_is_contiguous = torch.Tensor.is_contiguous
# torch wraps these methods to hide them from its compiler. The first call of a wrapper imports the compiler: half a
# second and 16 MB for a run that compiles nothing.
_ADD_PARAM_GROUP = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_ZERO_GRAD = inspect.unwrap(torch.optim.Optimizer.zero_grad)


@dataclass
class _GroupPlan:
    """How the last step split a group: its parameters, those without a gradient, and the rest in batches."""

    parameters: list[torch.Tensor]
    without_gradient: list[torch.Tensor]
    batches: list[tuple[torch.device, Batch]]


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, ``load_state_dict`` calls no hooks."""
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    hooks = {name: getattr(optimizer, name) for name in names}
    try:
        for name in names:
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        for name, own in hooks.items():
            setattr(optimizer, name, own)


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps the shards of this rank in one pass; see ``AdamOptimizer`` for the arguments.

    A subclass names its moments and does a step on a ``Batch``.
    """

    moments: tuple[str, ...]
    manager: weakref.ref[Any] | None = None  # the OptimManager that steps this optimizer
    _settings: tuple[str, ...] = ("_hold_steps", "_master", "_moment_dtype")  # attributes that copies keep

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        hold_steps: int,
        master: str,
        moment_dtype: torch.dtype,
    ) -> None:
        if not isinstance(hold_steps, int) or hold_steps < 0:
            raise ValueError(f"hold_steps is {hold_steps!r}, expected a whole number of at least 0")
        if master not in MASTERS:
            raise ValueError(f"master is {master!r}, expected one of {', '.join(MASTERS)}")
        if moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moment_dtype is {moment_dtype}, expected torch.float32 or torch.bfloat16")
        self._hold_steps, self._master, self._moment_dtype = hold_steps, master, moment_dtype
        self._reset_caches()
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own has only the state and the groups; copies and pickles need the settings too.
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in self._settings}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, and of load_state_dict
        self._reset_caches()

    def _reset_caches(self) -> None:
        self._plans: dict[int, _GroupPlan] = {}  # {id of a group's list of parameters: plan}
        self._states: list[dict[str, Any]] = []  # all states there were when the plans were made

    def update(
        self, group: dict[str, Any], batch: Batch, gscale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        """Step the shards of ``batch`` by the values of ``group``."""
        raise TypeError(f"{type(self).__name__} has no update")

    def check(self, batch: Batch) -> None:
        """Raise ValueError for a batch that ``update`` does not take; called before any is stepped."""

    @property
    def scale(self) -> float:
        """The loss scale of the OptimManager that has this optimizer, 1 without one. Reads the device."""
        manager = None if self.manager is None else self.manager()
        return 1.0 if manager is None else manager.loss_scale

    @undone_on_error
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; checks the group's values and parameters."""
        _ADD_PARAM_GROUP(self, param_group)
        self._check_group(self.param_groups[-1])
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                self._check_dtype(parameter)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_group(group, "lr", "eps", "weight_decay")
        betas = group["betas"]
        two = isinstance(betas, tuple | list) and len(betas) == 2
        if not (two and all(is_number(beta) and 0 <= beta < 1 for beta in betas)):
            raise ValueError(f"betas is {betas!r}, expected two numbers of at least 0 and below 1")

    def _check_dtype(self, parameter: torch.Tensor) -> None:
        if parameter.dtype not in FLOATS:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}: {type(self).__name__} computes "
                "in fp32 and takes fp32, bf16 and fp16 parameters; give it to an optimizer of torch"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        _ZERO_GRAD(self, set_to_none)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], torch.Tensor] | None = None,
        *,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """One step, without a host synchronisation.

        Args:
            closure: recomputes the loss, as in torch.
            grad_scale: 0-d fp32; gradients are divided by it, inside the kernel (clipping and loss scaling).
            found_inf: 0-d fp32; where it is 1 the step changes nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        outside_graphs(self._step)(grad_scale, found_inf)
        return loss

    def _step(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        factor = None if grad_scale is None else grad_scale.reciprocal()
        if others := not same_objects(self.state.values(), self._states):
            self._plans.clear()
        try:
            # All groups are checked before the first is stepped, so that an error leaves every parameter as it was.
            work = [(group, self._batches(group)) for group in self.param_groups]
            for group, batches in work:
                for device, batch in batches:
                    scale = None if factor is None else scalar_on(device, factor)
                    skip = None if found_inf is None else scalar_on(device, found_inf)
                    self.update({**group, "lr": 0.0} if batch.held else group, batch, scale, skip)
                    torch.autograd.graph.increment_version(batch.p)  # as torch's own in-place operators do
                    batch.g = []  # so that zero_grad frees them
        except BaseException:
            self._plans.clear()  # they hold gradients
            raise
        if others or len(self.state) != len(self._states):
            self._states = list(self.state.values())

    def _batches(self, group: dict[str, Any]) -> list[tuple[torch.device, Batch]]:
        """The shards of a group that have gradients, in batches: the previous step's, if only the gradients differ.

        With many small parameters, sorting them into batches dominates the step.
        """
        parameters = group["params"]
        plan = self._plans.get(id(parameters))
        if plan is not None and same_objects(parameters, plan.parameters):
            still_without = all(p.grad is None for p in plan.without_gradient)
            if still_without and all(self._reuse(batch) for _, batch in plan.batches):
                return plan.batches
        without = [p for p in parameters if p.grad is None]
        self._plans[id(parameters)] = plan = _GroupPlan([*parameters], without, self._by_operator(parameters))
        return plan.batches

    def _reuse(self, batch: Batch) -> bool:
        """Give a batch of the previous step the new gradients. Returns False if anything else has changed."""
        if batch.held:  # the held steps may be over
            return False
        gradients = gradients_of(batch.parameters)
        if type(None) in map(type, gradients):
            return False
        if not placed_alike(batch.parameters, gradients):  # placing them is collective, so it follows the group's order
            return False
        gradients = local_tensors(gradients)
        if not same_objects(local_tensors(batch.parameters), batch.p):
            return False
        if not same_objects(list(chain.from_iterable(map(dict.values, batch.states))), batch.values):
            return False
        if set(map(_dtype, gradients)) != {batch.gradient_dtype}:
            return False
        if not all(map(_is_contiguous, gradients)) or not all(map(_is_contiguous, batch.p)):
            return False
        batch.g = gradients
        return batch.fits

    def _by_operator(self, parameters: list[torch.Tensor]) -> list[tuple[torch.device, Batch]]:
        """The shards that have gradients, in batches that one call of an operator can step."""
        batches: dict[tuple[Any, ...], Batch] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                self._sort_in(parameter, batches)
        for batch in batches.values():
            self.check(batch)
        return [(key[0], batch) for key, batch in batches.items()]

    def _sort_in(self, parameter: torch.Tensor, batches: dict[tuple[Any, ...], Batch]) -> None:
        """Add the shard of a parameter, which has a gradient, to the batch of its kind; keys begin with the device."""
        assert parameter.grad is not None
        if parameter.grad.layout is not torch.strided:
            raise sparse_gradient(parameter.shape)
        gradient, state = local_tensor(placed_gradient(parameter)), self._ready_state(parameter)
        shard, m = local_tensor(parameter), local_tensor(state[self.moments[0]])
        mode = mode_of(state, shard)
        placed = mode == "random" or m.dtype == torch.uint8
        place = place_of(parameter) if placed else None
        dense = shard.is_contiguous() and m.is_contiguous()
        gradient = in_memory_as(gradient, shard, dense)
        fits = dense and (not placed or place is not None)
        held = self._is_held(state["step"])
        key = (shard.device, shard.dtype, gradient.dtype, m.dtype, mode, fits, held)
        batch = batches.get(key)
        if batch is None:
            fits = fits and shard.dtype in FLOATS and gradient.dtype in FLOATS
            batch = batches[key] = Batch(mode, fits, held, gradient_dtype=gradient.dtype)
        batch.add(parameter, gradient, state, self.moments)
        if placed:
            batch.places += (ROUNDING_KEY.get(parameter), *(place or ()))
            batch.whole.append(parameter)

    def _ready_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter, created if there is none, in the parameter's current dtype and strides."""
        state: dict[str, Any] = self.state[parameter] or self._init_state(parameter)
        if (parameter.dtype == torch.float32) == ("master" in state or "remainder" in state):
            self._convert_master(parameter, state)
        if local_tensor(parameter).stride() != local_tensor(state[self.moments[0]]).stride():
            self._match_strides(parameter, state)
        return state

    def _is_held(self, step: torch.Tensor) -> bool:
        """Whether ``hold_steps`` still holds a parameter after ``step`` steps. Reads the device only if it is set."""
        return self._hold_steps > 0 and step.item() < self._hold_steps

    def _init_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        self._check_dtype(parameter)
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.moments:
            state[name] = zero_moment(parameter, self._moment_dtype)
        self._convert_master(parameter, state)
        return state

    @torch.no_grad()
    def _convert_master(self, parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Convert the master or remainder of a 16-bit parameter to the kind that this optimizer keeps. A parameter that
        has become fp32 takes the value itself."""
        shard, remainder = local_tensor(parameter.detach()), False
        if parameter.dtype == torch.bfloat16:
            remainder = self._master == "remainder"
        if "remainder" in state and not remainder:
            state["master"] = torch.zeros_like(parameter, dtype=torch.float32)
            low, master = local_tensor(state.pop("remainder")), local_tensor(state["master"])
            fused.merge_master_([shard.to(torch.bfloat16)], [low], [master])
            shard.copy_(master)
        if parameter.dtype == torch.float32:
            if "master" in state:
                shard.copy_(local_tensor(state.pop("master")))
        elif "master" in state and remainder:
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
            master = local_tensor(state.pop("master"))
            fused.split_master_([master], [shard], [local_tensor(state["remainder"])])
        elif "master" not in state and "remainder" not in state and not ROUNDS_AT_RANDOM.get(parameter):
            if remainder:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
            else:
                state["master"] = parameter.detach().to(torch.float32)

    @torch.no_grad()
    def _match_strides(self, parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Give the states the parameter's memory layout: torch's kernels go through memory, not through indices.

        Raises ValueError for a parameter with gaps in its memory, since no new tensor has such a layout.
        """
        for name, value in state.items():
            state[name] = with_strides_of(parameter, value)
        shard = local_tensor(parameter)
        if local_tensor(state[self.moments[0]]).stride() != shard.stride():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} and strides {tuple(shard.stride())} has gaps in its "
                "memory: assign parameter.data = parameter.data.contiguous() first"
            )

    def _dtype_of(self, name: str, parameter: torch.Tensor) -> torch.dtype:
        if name in self.moments:
            return self._moment_dtype
        return torch.int16 if name == "remainder" else torch.float32

    def _quantised(self, parameter: torch.Tensor) -> bool:
        """Whether its moments have 8 bits."""
        return False

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """As in torch. With ``gather``, states are whole and on the CPU of every rank; collective."""
        state_dict: dict[str, Any] = super().state_dict()
        return whole_states(state_dict) if gather else with_parts(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but states keep their dtypes, which torch would change to the parameter's.

        Masters of one kind ("fp32", "remainder") are converted to the other without loss; a 16-bit parameter without a
        master gets one. Of whole states, this rank takes its shards. Raises ValueError for states of another kind of
        optimizer, or of other parameters.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, dict(state_dict)) or state_dict
        own, state_dict = isinstance(state_dict, OwnStates), as_adamw_state(self, state_dict)
        for parameter, saved in saved_states(self, state_dict):
            bits = "exp_avg_scale" in saved
            if "exp_avg" in saved and bits != self._quantised(parameter):
                kinds = ("8-bit", "fp32") if bits else ("fp32", "8-bit")
                raise ValueError(
                    f"the state of a parameter of shape {tuple(parameter.shape)} has {kinds[0]} moments, but this "
                    f"{type(self).__name__} keeps {kinds[1]} ones: load it with the optimizer and min_size it was "
                    "saved with"
                )
        shapes = lambda p: {"step": (), **dict.fromkeys(self.moments, tuple(p.shape))}  # noqa: E731
        check_states(self, state_dict, shapes, _OPTIONAL_STATES)
        for group in state_dict["param_groups"]:
            self._check_group({**group, "params": []})
        # torch would first convert all states to the parameters' dtypes and devices, which may not have room for them.
        with _without_hooks(self):
            super().load_state_dict({**state_dict, "state": {}})
        for parameter, saved in saved_states(self, state_dict):
            if saved:
                state = self.state[parameter] = {
                    name: self._loaded(name, value, parameter, own) if isinstance(value, torch.Tensor) else value
                    for name, value in saved.items()
                }
                if "step" in state:
                    self._convert_master(parameter, state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def state_device(self, parameter: torch.Tensor) -> torch.device:
        """Where the states of a parameter are."""
        return parameter.device

    @torch.no_grad()
    def _loaded(self, name: str, value: torch.Tensor, parameter: torch.Tensor, own: bool) -> torch.Tensor:
        """A loaded state as this optimizer keeps it. As in torch, that is ``value`` itself if it has the parameter's
        dtype and is where the state belongs, else a copy, unless the value is the optimizer's ``own``."""
        device = self.state_device(parameter)
        if name == "step":
            return value.to(device, torch.float32, copy=not own)
        value = placed_as(value.detach(), parameter) if value.shape == parameter.shape else value.detach()
        dtype, here = self._dtype_of(name, parameter), local_tensor(value).device == device
        value = value.to(dtype=dtype, copy=here and not own and parameter.dtype != dtype)
        return with_strides_of(parameter, value if here else with_local(value, local_tensor(value).to(device)))
