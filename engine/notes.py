"""What the engine notes on objects that are not its own: on parameters, modules and models.

A note is an attribute whose name begins with ``_engine``, and lives as long as its object: a parameter that is replaced
by its shard leaves its notes behind (``engine.shards.user_attributes`` are carried over). All notes on parameters,
modules and models are listed here; ``engine.recompute`` marks the functions that it wraps itself, and
``engine.bmtrain.block`` the parameters in a block, by an attribute that goes over to the shard as a user's does. They
are attributes and no table of records because a step reads one for each parameter.
"""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from engine.names import clean_name

if TYPE_CHECKING:
    from engine.parallel.pipeline.stages import Stages
    from engine.policy import Policy

T = TypeVar("T")


@dataclass(frozen=True)
class Note(Generic[T]):
    """One attribute that the engine sets on tensors or modules, and its value where it was not set."""

    name: str
    default: T

    def get(self, noted: torch.Tensor | nn.Module) -> T:
        value: T = noted.__dict__.get(self.name, self.default)
        return value

    def set(self, noted: torch.Tensor | nn.Module, value: T) -> None:
        noted.__dict__[self.name] = value


# -- parameters --------------------------------------------------------------------------------------------------------

#: The name of a parameter that ``engine.shard`` has replaced by its shard: an optimizer that holds it trains nothing.
REPLACED_AS: Note[str | None] = Note("_engine_sharded_as", None)
#: A ``DistributedParameter`` that is to be sharded before it is trained: until then the ranks would train apart.
AWAITS_SHARDING: Note[bool] = Note("_engine_waits_for_sharding", False)
#: Not sharded, but ``engine.accumulate`` averages its gradient over the ranks.
GRADIENT_IS_AVERAGED: Note[bool] = Note("_engine_averaged", False)
#: In a pipeline. "own": other stages do not have the parameter; "copy": this stage's copy of another's; None: all have
#: it. ``grad_norm`` counts by it.
STAGE_ROLE: Note[str | None] = Note("_engine_stage", None)
#: A number made from its name, by which the parameter, or a state of it, is rounded at random.
ROUNDING_KEY: Note[int] = Note("_engine_rounding_key", 0)
#: Whether updates are rounded into the parameter at random ("bf16-sr").
ROUNDS_AT_RANDOM: Note[bool] = Note("_engine_rounds_at_random", False)
#: Whether the states of its optimizer are to be in host memory (``Policy(offload=...)``).
STATES_ON_HOST: Note[bool] = Note("_engine_states_on_host", False)
#: Cache of ``engine.optim.rounding.place_of``: (shape of the shard, its place in the whole).
SHARD_PLACE: Note[Any] = Note("_engine_place", None)
#: Cache of ``engine.optim.clip``: the ranks that hold other parts of the parameter, one object for each layout. A step
#: reads it by ``operator.attrgetter``.
NORM_LAYOUT: Note[Any] = Note("_engine_norm_layout", None)


def note_name(parameter: torch.Tensor, name: str) -> None:
    """Let the name decide the random bits by which the parameter, or a state of it, is rounded."""
    ROUNDING_KEY.set(parameter, zlib.crc32(name.encode()))


def round_at_random(parameter: torch.Tensor, name: str) -> None:
    """Let ``AdamOptimizer`` round its updates of a bf16 ``parameter`` at random, by the bits of this name."""
    note_name(parameter, name)
    ROUNDS_AT_RANDOM.set(parameter, parameter.dtype == torch.bfloat16)


# -- modules and models ------------------------------------------------------------------------------------------------

#: A module whose parameters are on another stage of the pipeline.
ABSENT: Note[bool] = Note("_engine_absent", False)
#: Whether a step of ``engine.accumulate`` has left a parameter of a model unused on a rank; None: none was made yet.
LEAVES_UNUSED: Note[bool | None] = Note("_engine_leaves_unused", None)
#: A unit, or the root, of a plain model that computes in 16 bits: it sees casts of its own parameters.
CASTS: Note[bool] = Note("_engine_casts", False)
#: The casts that a backward shows in the places of such a unit's parameters, until it ends.
SHOWN: Note[Any] = Note("_engine_shown", None)
#: A unit that level 3 leaves gathered after forward, because backward needs it first.
STAYS_GATHERED: Note[bool] = Note("_engine_stays_gathered", False)
_STAGES: Note[Any] = Note("_engine_stages", None)


def stages_of(model: nn.Module) -> Stages | None:
    """What ``model`` was before one stage was left of it; None: it is whole."""
    stages: Stages | None = _STAGES.get(model)
    return stages


def set_stages(model: nn.Module, stages: Stages) -> None:
    """Note that ``model`` has been left one stage of ``stages``."""
    _STAGES.set(model, stages)


@dataclass
class _Sharding:
    policy: Policy
    level: int | None  # None: the model stays plain


# Not a note: a copy of a model is not sharded.
_shardings: weakref.WeakKeyDictionary[nn.Module, _Sharding] = weakref.WeakKeyDictionary()


def set_sharding(model: nn.Module, policy: Policy, level: int | None = None) -> None:
    """Note what ``engine.shard`` was given for ``model``, and the level at which it is laid out once it is."""
    _shardings[model] = _Sharding(policy, level)


def policy_of(model: nn.Module) -> Policy | None:
    """The policy that ``engine.shard`` was given for ``model``, if it was."""
    found = _shardings.get(model)
    return None if found is None else found.policy


def zero_level(model: nn.Module) -> int:
    """The level at which ``engine.shard`` laid out ``model``; 3 for one that its user gave to ``fully_shard``."""
    found = _shardings.get(model)
    return 3 if found is None or found.level is None else found.level


def note_parameters(model: nn.Module) -> None:
    """Note on each parameter of ``model`` how it is rounded and, in a pipeline, which stages have it; and, if the model
    was given to ``engine.shard``, where its states are to be, and that it awaits that no more."""
    policy, stages = policy_of(model), stages_of(model)
    note = round_at_random if policy is not None and policy.precision == "bf16-sr" else note_name
    for full_name, parameter in model.named_parameters():
        name = clean_name(full_name)
        note(parameter, name)
        if policy is not None:
            AWAITS_SHARDING.set(parameter, False)  # it stays plain, as one without dimensions does
            STATES_ON_HOST.set(parameter, policy.offload != "none")
        if stages is not None and name in stages.spread:
            STAGE_ROLE.set(parameter, "copy" if name in stages.copies else "own")
