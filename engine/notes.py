"""What the engine notes on objects of the user's: parameters, modules and models.

A note is an attribute whose name begins with ``_engine``. It lives as long as its object: a parameter that is replaced
by its shard leaves its notes behind (``engine.shards.user_attributes`` are carried over). All notes are listed here,
with two exceptions: ``engine.recompute`` marks the functions that it wraps, and ``engine.bmtrain.block`` marks the
parameters in a block by an attribute that is carried over to the shard, as a user's is. Notes are attributes rather
than entries of a table because a step reads one for each parameter.
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
    """An attribute that the engine sets on tensors or modules, and its value where it was not set."""

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
#: A ``DistributedParameter`` that must be sharded before it is trained: until then the ranks would diverge.
AWAITS_SHARDING: Note[bool] = Note("_engine_waits_for_sharding", False)
#: Not sharded, but ``engine.accumulate`` averages its gradient over the ranks.
GRADIENT_IS_AVERAGED: Note[bool] = Note("_engine_averaged", False)
#: In a pipeline: "own": other stages do not have the parameter; "copy": it is a copy of another stage's; None: all
#: stages have it. ``grad_norm`` counts each parameter once by it.
STAGE_ROLE: Note[str | None] = Note("_engine_stage", None)
#: A number derived from the parameter's name, which seeds the random rounding of the parameter or of its states.
ROUNDING_KEY: Note[int] = Note("_engine_rounding_key", 0)
#: Whether updates are rounded into the parameter at random ("bf16-sr").
ROUNDS_AT_RANDOM: Note[bool] = Note("_engine_rounds_at_random", False)
#: Whether the parameter's optimizer states belong in host memory (``Policy(offload=...)``).
STATES_ON_HOST: Note[bool] = Note("_engine_states_on_host", False)
#: Cache of ``engine.optim.rounding.place_of``: (shape of the shard, its place in the whole).
SHARD_PLACE: Note[Any] = Note("_engine_place", None)
#: Cache of ``engine.optim.clip``: which ranks hold other parts of the parameter, one object per layout. A step reads it
#: by ``operator.attrgetter``.
NORM_LAYOUT: Note[Any] = Note("_engine_norm_layout", None)


def note_name(parameter: torch.Tensor, name: str) -> None:
    """Derive the random bits that round the parameter, or its states, from this name."""
    ROUNDING_KEY.set(parameter, zlib.crc32(name.encode()))


def round_at_random(parameter: torch.Tensor, name: str) -> None:
    """Let ``AdamOptimizer`` round its updates of a bf16 ``parameter`` at random, by bits derived from this name."""
    note_name(parameter, name)
    ROUNDS_AT_RANDOM.set(parameter, parameter.dtype == torch.bfloat16)


# -- modules and models ------------------------------------------------------------------------------------------------

#: A module whose parameters are on another stage of the pipeline.
ABSENT: Note[bool] = Note("_engine_absent", False)
#: Whether a step of ``engine.accumulate`` has left a parameter of a model unused on some rank; None: no step yet.
LEAVES_UNUSED: Note[bool | None] = Note("_engine_leaves_unused", None)
#: A unit, or the root, of a plain model that computes in 16 bits: its forward sees casts of its own parameters.
CASTS: Note[bool] = Note("_engine_casts", False)
#: The casts that a backward shows in place of such a unit's parameters until it ends.
SHOWN: Note[Any] = Note("_engine_shown", None)
#: A unit that level 3 leaves gathered after forward, because backward needs it first.
STAYS_GATHERED: Note[bool] = Note("_engine_stays_gathered", False)
_STAGES: Note[Any] = Note("_engine_stages", None)


def stages_of(model: nn.Module) -> Stages | None:
    """What ``model`` was before it was reduced to one stage of a pipeline; None: it is whole."""
    stages: Stages | None = _STAGES.get(model)
    return stages


def set_stages(model: nn.Module, stages: Stages) -> None:
    """Note that ``model`` has been reduced to one of ``stages``."""
    _STAGES.set(model, stages)


@dataclass
class _Sharding:
    policy: Policy
    level: int | None  # None: the model stays plain


# Not a note: a copy of a model is not sharded.
_shardings: weakref.WeakKeyDictionary[nn.Module, _Sharding] = weakref.WeakKeyDictionary()


def set_sharding(model: nn.Module, policy: Policy, level: int | None = None) -> None:
    """Note the policy that ``engine.shard`` was given for ``model``, and its ZeRO level once it is sharded."""
    _shardings[model] = _Sharding(policy, level)


def policy_of(model: nn.Module) -> Policy | None:
    """The policy that ``engine.shard`` was given for ``model``; None: it was not called."""
    found = _shardings.get(model)
    return None if found is None else found.policy


def zero_level(model: nn.Module) -> int:
    """The ZeRO level of ``model``; 3 for a model that the user sharded with ``fully_shard``."""
    found = _shardings.get(model)
    return 3 if found is None or found.level is None else found.level


def note_parameters(model: nn.Module) -> None:
    """Note on each parameter of ``model`` how it is rounded and, in a pipeline, which stages have it. If the model was
    given to ``engine.shard``, also note where its optimizer states belong, and that it no longer awaits sharding."""
    policy, stages = policy_of(model), stages_of(model)
    note = round_at_random if policy is not None and policy.precision == "bf16-sr" else note_name
    for full_name, parameter in model.named_parameters():
        name = clean_name(full_name)
        note(parameter, name)
        if policy is not None:
            AWAITS_SHARDING.set(parameter, False)  # even if it stays plain, as parameters without dimensions do
            STATES_ON_HOST.set(parameter, policy.offload != "none")
        if stages is not None and name in stages.spread:
            STAGE_ROLE.set(parameter, "copy" if name in stages.copies else "own")
