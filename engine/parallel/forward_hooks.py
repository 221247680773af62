"""Hooks on the forward of a sharded model, which free gathered parameters where FSDP would not.

From the moment that FSDP gathers a unit until it frees it, the unit's modules show whole parameters, while the
optimizer holds the shards. After a forward without a backward, some are still shown; whatever is done to them is lost.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from engine import runtime
from engine.names import clean_name
from engine.optim.checks import before_each_step, mark_sharded
from engine.parallel.checks import check_hooks
from engine.parallel.fsdp import (
    DataAssignments,
    always_reduce_unused,
    around_backward,
    backward_was_left,
    clear_shards_too,
    drop_pass,
    gathered_parameters,
    has_unreduced_gradients,
    is_watched,
    look_into_objects,
    make_root,
    records_of,
    replaced_parameter,
    reshard,
    trained_shards,
    under_way,
    with_gathered,
)
from engine.parallel.gloo.collectives import GlooCollectives
from engine.parallel.scalars import Scalars
from engine.parallel.unused import Unused
from engine.torch_compat import in_backward

_MIXED = "mixed torch.Tensor and DTensor"
_MIXED_NOTE = (
    "engine.shard: a module used parameters of another one, which are gathered only in that one's forward. Leave the "
    "other one out of units=, so that its parameters are gathered with the model's, or call it."
)


class ForwardHooks:
    """Counts the calls of a model that are under way, and frees gathered parameters after the outermost if needed."""

    def __init__(self, model: nn.Module, collectives: GlooCollectives | None) -> None:
        self._model, self._collectives = weakref.ref(model), collectives
        self._depth = 0  # nested calls of the model that are under way
        self._started = False
        self._records: list[Any] = []  # FSDP's records of the parameters
        self._assignments: DataAssignments | None = None
        self._dtype: torch.dtype | None = None
        self._scalars: Scalars | None = None
        self._unused: Unused | None = None

    def watch(self) -> None:
        """Register the hooks on the model and on its units."""
        model = self._model()
        assert model is not None
        self._records = list(records_of(model))
        self._assignments = DataAssignments(self._records)
        model.register_forward_pre_hook(self.enter, prepend=True)
        model.register_forward_hook(self.leave, always_call=True)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                around_backward(unit, self._before_backward, self._in_backward)
                look_into_objects(unit)
                clear_shards_too(unit)
                if unit is not model:
                    unit.register_forward_pre_hook(self._enter_unit, prepend=True)
        settings = runtime.current()
        # Pipeline stages have different parameters, and the ranks of a tensor-parallel group always use the same ones.
        if settings.pp_size == 1 and runtime.world_size() > settings.tp_size:
            self._unused = Unused(model)
            always_reduce_unused(model, self._unused)
        mark_sharded(model, gathered_parameters)
        _reshard_at_steps()

    def enter(self, *_: Any) -> None:
        """Before a forward, or another method that uses parameters. These may call each other."""
        if self._depth == 0:
            self._check_replaced()
        if not self._started:
            self._start()
        if self._records and (dtype := self._records[0].sharded_param.dtype) != self._dtype:
            raise ValueError(
                f"the parameters were {self._dtype} at the model's first forward and are {dtype} now, which FSDP does "
                "not support: convert the model before engine.shard, or set the dtype of computations with "
                "Policy(precision=...)"
            )
        if self._depth == 0:
            self._drop_old()
            if (model := self._model()) is not None:
                under_way.add(model)
        self._depth += 1

    def leave(self, *_: Any) -> None:
        """After it, even if it raised: free what was gathered, if no backward will."""
        # Without a backward nothing frees the gathered parameters, and an optimizer built now would hold them.
        entered, self._depth = self._depth > 0, max(0, self._depth - 1)
        if (error := sys.exception()) is not None and _MIXED in str(error):
            if _MIXED_NOTE not in getattr(error, "__notes__", ()):
                error.add_note(_MIXED_NOTE)
        if self._depth or not entered:  # not entered: `enter` raised and has changed nothing
            return
        if self._collectives is not None:
            self._collectives.after_forward()
        if (model := self._model()) is None:
            return
        under_way.discard(model)
        if not torch.is_grad_enabled():
            reshard(model)
            return
        with_gathered.add(model)

    def _before_backward(self) -> None:
        _refuse_create_graph()
        if self._scalars is not None:
            self._scalars.average_later()

    def _in_backward(self) -> None:
        if self._unused is not None and not is_watched():
            self._unused.agree_later()

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, counted as a call of the model, so that a forward inside it frees nothing that it still uses."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter()
            try:
                return method(*args, **kwargs)
            finally:
                self.leave()

        return call

    def _enter_unit(self, *_: Any) -> None:
        if self._depth == 0 and (model := self._model()) is not None:  # called by itself
            self._check_replaced()
            if not self._started:
                self._start()
            if not in_backward():  # in a recomputation, what is gathered ahead belongs to the backward
                self._drop_old()
            with_gathered.add(model)

    def _check_replaced(self) -> None:
        """Raise ValueError if FSDP would compute with its own parameters instead of those that the user put there."""
        model = self._model()
        if model is None or self._assignments is None:
            return
        if (place := replaced_parameter(self._records)) is not None:
            raise ValueError(
                f"parameter {_name_in(model, *place)} was replaced after engine.shard, by torch.func.functional_call "
                "or an assignment, and the new one would not be used. Set new values with load_state_dict, or write "
                "them into the shard; call functional_call with a model that is not sharded"
            )
        if (place := self._assignments.find()) is not None:
            raise ValueError(
                f"something was assigned to the data of parameter {_name_in(model, *place)}, by parameter.data = x or "
                "torch.nn.utils.vector_to_parameters, which does not change the shard. Write parameter.copy_(x), under "
                "torch.no_grad(), or set new values with load_state_dict"
            )

    def _drop_old(self) -> None:
        """Make FSDP forget a backward that an exception ended, since otherwise it would never reduce the root's
        gradients again, and drop what was gathered ahead, since the parameters may have changed."""
        model = self._model()
        if isinstance(model, FSDPModule) and backward_was_left(model):
            drop_pass(model)
        if self._collectives is not None:
            self._collectives.before_forward()

    def _start(self) -> None:
        """Prepare the model before it, or a unit of it, is called for the first time."""
        self._started = True
        if (model := self._model()) is None:
            return
        check_hooks(model)
        assert isinstance(model, FSDPModule)
        make_root(model)  # otherwise FSDP makes the first unit that is called the root
        self._scalars = Scalars(model)
        if self._records:
            self._dtype = self._records[0].sharded_param.dtype
        if self._collectives is not None:
            for shard in trained_shards(model):  # after check_hooks, which rejects the user's hooks
                shard.register_hook(self._collectives.before_accumulation)
        if torch.is_inference_mode_enabled():
            _gather_once(model)


def _name_in(model: nn.Module, module: nn.Module, name: str) -> str:
    inside = next((prefix for prefix, m in model.named_modules() if m is module), type(module).__name__)
    return f"{clean_name(f'{inside}.{name}' if inside else name)} of this {type(model).__name__}"


def _refuse_create_graph() -> None:
    """A second backward would read gathered parameters that FSDP has freed or overwritten, and crash the process."""
    if torch.is_grad_enabled():  # within a backward, that is so only with create_graph
        raise ValueError(
            "create_graph=True: a sharded model has no second derivatives (as for a gradient penalty). Compute them on "
            "a model that is not sharded, or leave create_graph out"
        )


@torch.inference_mode(False)
def _gather_once(model: nn.Module) -> None:
    """Allocate FSDP's tensors for gathered parameters, because training could not use those of inference mode."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


@functools.cache
def _reshard_at_steps() -> None:
    before_each_step(_reshard_shown)


def _reshard_shown(*_: Any) -> None:
    """Free what forwards without a backward have gathered, because the coming step changes only the shards.

    Raises ValueError if a backward has left gradients there, which would be lost.
    """
    if in_backward():  # the optimizer steps inside a backward, which still uses what is gathered
        return
    while with_gathered:
        model = with_gathered.pop()
        if isinstance(model, FSDPModule) and has_unreduced_gradients(model):
            drop_pass(model)
            raise ValueError(
                f"the backward of {type(model).__name__} did not go through the outputs of its forward, so gradients "
                "were not reduced and this step would lose them. Let forward return the tensors that the loss depends "
                "on: one, or several in a tuple, list, dict, dataclass or the attributes of an object"
            )
        reshard(model)
