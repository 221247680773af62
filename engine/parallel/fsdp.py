"""The internals of FSDP2 that the engine needs. FSDP's private names are used here and nowhere else."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from engine.outputs import trained_tensors
from engine.torch_compat import in_backward


@functools.cache
def shards_integers() -> bool:
    """Whether FSDP shards integer parameters, as quantised layers have them. torch 2.11 wants gradients of them."""
    return "requires_grad=param.requires_grad" in inspect.getsource(FSDPParam._init_sharded_param)


def reshard(model: torch.nn.Module) -> None:
    """Free the gathered parameters, so that ``model.parameters()`` are the shards that the optimizer updates."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Models whose last forward has left parameters gathered: a step would not change these, and the next forward uses them.
with_gathered: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
under_way: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models that are inside their forward


def reshard_around(part: torch.nn.Module) -> None:
    """Free what the models that contain ``part`` have gathered, except for those inside their forward."""
    modules = set(part.modules())
    for model in list(with_gathered):
        if model not in under_way and not modules.isdisjoint(model.modules()):
            reshard(model)


class Uses(Protocol):
    """An observer that is told, in each backward, which parameters it uses."""

    notes: bool  # whether `note` is called
    modules: set[torch.nn.Module] | None  # the modules that reduce zeros, because the backward reaches them; None: all

    def note(self, shard: torch.Tensor) -> None:
        """The parameter got a gradient."""

    def note_unused(self, shard: torch.Tensor) -> None:
        """The parameter got no gradient, and zeros are about to be reduced for it."""

    def note_reduced(self, number: int) -> None:
        """The gradients of group ``number`` are about to be reduced."""


# The observers of backwards that are under way.
_watching: list[Uses] = []


def note_gradient(shard: torch.Tensor) -> None:
    """Report that the current backward uses a parameter that was gathered outside FSDP's units."""
    for uses in _watching:
        uses.note(shard)


@contextmanager
def reducing_unused(roots: Iterable[FSDPModule], uses: Uses) -> Iterator[set[torch.Tensor]]:
    """Inside, parameters that got no gradient take part in the reduction with zeros.

    FSDP itself reduces only those that got a gradient. If these differ between ranks or, in hybrid sharding, between
    microbatches, it takes one parameter's gradient for another's. Yields the shards of all of FSDP's parameters.
    """
    groups = [group for root in roots for group in _groups_inside(root)]
    outside = [group.post_backward for group in groups]
    _reduce_unused(groups, uses)
    _watching.append(uses)
    try:
        yield {p.sharded_param for group in groups for p in group.fsdp_params}
    finally:
        _watching.remove(uses)
        for group, post_backward in zip(groups, outside, strict=True):
            vars(group)["post_backward"] = post_backward


def always_reduce_unused(root: torch.nn.Module, uses: Uses) -> None:
    """Do the same in every backward outside ``reducing_unused``."""
    _reduce_unused(_groups_inside(root), uses)


def _reduce_unused(groups: Iterable[Any], uses: Uses) -> None:
    for number, group in enumerate(groups):
        vars(group)["post_backward"] = functools.partial(_post_backward_with_zeros, group, number, {}, uses)


def is_watched() -> bool:
    """Whether a backward now would be inside ``reducing_unused``."""
    return bool(_watching)


def _post_backward_with_zeros(group: Any, number: int, before: dict[Any, Any], uses: Uses, *_: Any) -> None:
    """FSDP's own ``post_backward``, with zeros. torch 2.13 can insert these itself, but does not report where.

    before: {FSDP's record of a parameter: ``_state`` of the gradient that earlier backwards have left}.
    """
    gathered = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    if uses.notes:
        for p in gathered:
            if (gradient := p.unsharded_param.grad) is not None and before.get(p) != _state(gradient):
                uses.note(p.sharded_param)
    if group.reduce_grads:
        reached = uses.modules is None or not uses.modules.isdisjoint(group.modules)
        added_up = any(p.unsharded_accumulated_grad is not None for p in gathered)
        for p in gathered:
            whole = p.unsharded_param
            # If it was frozen after the unit last ran, only the shard knows it so far.
            trained = whole.requires_grad and p.sharded_param.requires_grad
            if p.unsharded_accumulated_grad is not None or not trained:
                continue
            if whole.grad is None and reached:
                whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)  # torch 2.15 sums in another dtype there
                uses.note_unused(p.sharded_param)
            if added_up and _sums_are_apart(p):
                p.to_accumulated_grad_if_needed()  # FSDP reduces one dtype, and sums have the reduction's
        if any(p.unsharded_param.grad is not None or p.unsharded_accumulated_grad is not None for p in gathered):
            uses.note_reduced(number)
    type(group).post_backward(group)
    if uses.notes:
        before.update((p, _state(p.unsharded_param.grad)) for p in gathered)


def _sums_are_apart(record: Any) -> bool:
    """Whether FSDP accumulates gradients outside of ``.grad``; since torch 2.15 ``.grad`` itself is the sum."""
    return "unsharded_accumulated_grad" in vars(record)


def _state(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """A value that changes when a backward adds to the gradient."""
    return None if gradient is None else (id(gradient), gradient._version)


def _groups(unit: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP gathers together when this unit runs."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; earlier there was one group, or None
    if groups is None:
        groups = [group] if (group := state._fsdp_param_group) is not None else []
    return groups


def _groups_inside(model: Any) -> Iterator[Any]:
    """The groups of all units of a model."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            yield from _groups(unit)


def records_of(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP's record (``FSDPParam``) of each parameter that it shards, whose ``sharded_param`` is the shard."""
    for group in _groups_inside(model):
        yield from group.fsdp_params


def clear_shards_too(unit: torch.nn.Module) -> None:
    """Make ``unit.zero_grad()`` reach the shards even while gathered parameters, which have no gradient, are shown."""

    def zero_grad(set_to_none: bool = True) -> None:
        for record in records_of(unit):
            shard = record.sharded_param
            if set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()
        type(unit).zero_grad(unit, set_to_none)

    vars(unit)["zero_grad"] = zero_grad


def gathered_parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """The gathered parameters that FSDP has allocated so far; it reuses these tensors."""
    return [record._unsharded_param for record in records_of(model) if hasattr(record, "_unsharded_param")]


def all_shards(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The shards of all parameters, even while gathered ones are shown in their places."""
    return (record.sharded_param for record in records_of(model))


def trained_shards(model: torch.nn.Module) -> list[torch.Tensor]:
    """The shards that the optimizer updates."""
    return [shard for shard in all_shards(model) if shard.requires_grad]


def replaced_parameter(records: Iterable[Any]) -> tuple[torch.nn.Module, str] | None:
    """The place (module, name) of a parameter that was replaced by a tensor which is not FSDP's, so that FSDP would not
    use it; None if there is none."""
    for record in records:
        place = record._module_info
        own = record._unsharded_param if record.sharded_state is ShardedState.UNSHARDED else record.sharded_param
        if place.module._parameters.get(place.param_name) is not own:
            return place.module, place.param_name
    return None


class DataAssignments:
    """Detects ``parameter.data = x`` on a shard, which changes only the outer tensor of a DTensor and not its local
    tensor, from which everything is computed.

    The outer tensor has a storage of its own, without memory. Legitimate changes, such as ``module.to``, change both.
    """

    def __init__(self, records: list[Any]) -> None:
        self._records = records
        self._note()

    def _note(self) -> None:
        shards = [record.sharded_param for record in self._records]
        self._storages = [shard.untyped_storage() for shard in shards]  # kept alive, so that addresses stay unique
        self._addresses = [storage._cdata for storage in self._storages]
        self._elements = [weakref.ref(shard._local_tensor) for shard in shards]

    def find(self) -> tuple[torch.nn.Module, str] | None:
        """The place (module, name) of a parameter to whose data something was assigned since the last call, or None."""
        now = [record.sharded_param.untyped_storage()._cdata for record in self._records]
        if now == self._addresses:
            return None
        places = (
            (record._module_info.module, record._module_info.param_name)
            for record, new, old, elements in zip(self._records, now, self._addresses, self._elements, strict=True)
            if new != old and record.sharded_param._local_tensor is elements()
        )
        found = next(places, None)
        self._note()
        return found


def make_root(model: FSDPModule) -> None:
    """Make ``model`` FSDP's root, which otherwise is the first module that is called."""
    model._get_fsdp_state()._lazy_init()


def around_backward(unit: FSDPModule, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` when a backward pass reaches ``unit``, before FSDP does anything for it, and ``after`` once FSDP
    has gathered the parameters."""
    state, groups = unit._get_fsdp_state(), _groups(unit)
    theirs = state._pre_backward

    def pre_backward(gradient: torch.Tensor) -> torch.Tensor:
        before()
        for group in groups:
            _init_dtypes_of_unfrozen(group)
        gradient = theirs(gradient)
        after()
        return gradient

    vars(state)["_pre_backward"] = pre_backward


def look_into_objects(unit: FSDPModule) -> None:
    """Make a backward reach ``unit``, whose ``around_backward`` is set, also through tensors in objects it returns.

    FSDP looks only into lists, tuples, dicts and dataclasses. If it misses a unit in backward, it neither gathers the
    unit's parameters nor reduces their gradients. If it finds a tensor there is no further search: a cache beside the
    logits, for example, is not searched.
    """
    state = unit._get_fsdp_state()
    theirs = state._register_pre_backward_hook

    def reaches_unit(tensor: torch.Tensor) -> bool:
        return state._pre_backward in (tensor._backward_hooks or {}).values()

    def register(output: Any) -> Any:
        output = theirs(output)
        if torch.is_grad_enabled() and not any(map(reaches_unit, trained_tensors(output))):
            for tensor in trained_tensors(output, in_objects=True):
                if tensor.grad_fn is not None:  # otherwise it is a parameter of some model
                    tensor.register_hook(state._pre_backward)
        return output

    vars(state)["_register_pre_backward_hook"] = register


def has_unreduced_gradients(root: FSDPModule) -> bool:
    """Whether a finished backward has left gradients on gathered parameters, because FSDP did not notice it.

    False after a backward that raised, and for units whose reduction ``set_requires_gradient_sync`` has put off.
    """
    groups = [group for group in _groups_inside(root) if group.reduce_grads]
    gathered = [p._unsharded_param for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    return any(p.grad is not None for p in gathered) and not backward_was_left(root)


def _init_dtypes_of_unfrozen(group: Any) -> None:
    """Before torch 2.15, FSDP determines gradient dtypes before the first forward, and finds none if all is frozen."""
    if vars(group).get("_orig_dtype", True) is None and any(p.sharded_param.requires_grad for p in group.fsdp_params):
        group._init_mp_dtypes()


def backward_was_left(root: FSDPModule) -> bool:
    """Whether an exception ended a backward of ``root``: FSDP waits for the end of a backward, but none is running."""
    return root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued and not in_backward()


def drop_pass(root: FSDPModule) -> None:
    """Make FSDP forget the forward or backward that an exception ended, and all gradients that are not reduced yet."""
    state = root._get_fsdp_state()
    records = list(records_of(root))  # type: ignore[arg-type]
    if state._is_root:  # else no forward has begun, or an enclosing root will recover in its next forward
        if hasattr(root, "reset_iter_state"):  # torch 2.13
            reduced = [record.sharded_param.grad for record in records]
            root.reset_iter_state()
            for record, gradient in zip(records, reduced, strict=True):
                record.sharded_param.grad = gradient  # which torch 2.15 drops too
        else:
            _reset_iter_state(root)
    for record in records:
        if _sums_are_apart(record):
            record.unsharded_accumulated_grad = None
        if hasattr(record, "_unsharded_param"):
            record._unsharded_param.grad = None


def _reset_iter_state(root: FSDPModule) -> None:
    """torch 2.13's ``reset_iter_state``, for earlier versions."""
    state = root._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    for unit in (m for m in root.modules() if isinstance(m, FSDPModule)):  # type: ignore[attr-defined]
        unit._get_fsdp_state()._training_state = TrainingState.IDLE
        for group in _groups(unit):
            group.wait_for_unshard()
            group._post_forward_indices.clear()
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def gather_ahead(root: FSDPModule) -> None:
    """Let the units of ``root`` gather in the background when ``unshard`` is called ahead of time."""
    root._set_unshard_async_op(True)


def sums_are_only_viewed(unit: FSDPModule, dtype: torch.dtype) -> bool:
    """Whether FSDP will use averaged gradients of this unit in ``dtype`` directly as the shards' gradients: it does not
    convert, accumulate or reduce them further, and no hook reads them before backward is over."""
    groups = _groups(unit)
    shards = [p.sharded_param for group in groups for p in group.fsdp_params]  # even while gathered ones are shown
    return all(group._all_reduce_hook is None for group in groups) and all(
        p.grad is None and p.dtype == dtype and p.device_mesh.ndim == 1 and not p._post_accumulate_grad_hooks
        for p in shards
        if p.requires_grad
    )
