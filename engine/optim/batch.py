"""Batches of shards: what one call of a fused operator steps."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.tensors import local_tensor


@dataclass
class Batch:
    """Shards of one device, dtype and mode, which one call of an operator steps.

    Attributes:
        mode: how fp32 values are kept, see engine.ops.fused. fits: whether the operators take these shards.
        held: whether this is one of the first steps, which change no parameter (``hold_steps``).
        p, g, m, v, aux, steps: the lists that the operators take: shards, their gradients, first and second moments,
            masters or remainders, and step counts.
        places, whole: if something is rounded stochastically, the places of the shards in the whole parameters, and
            these parameters.
        parameters, states, values: the parameters of p, their states and the values in these: if they are still the
            same objects, the batch serves the next step too.
    """

    mode: str
    fits: bool
    held: bool = False
    p: list[torch.Tensor] = field(default_factory=list)
    g: list[torch.Tensor] = field(default_factory=list)
    m: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    aux: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    whole: list[torch.Tensor] = field(default_factory=list)
    gradient_dtype: torch.dtype | None = None
    parameters: list[torch.Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def add(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], moments: tuple[str, ...]
    ) -> None:
        """Add the shard of a parameter and what the operator steps with it."""
        self.parameters.append(parameter)
        self.states.append(state)
        self.values += state.values()
        self.p.append(local_tensor(parameter))
        self.g.append(gradient)
        self.m.append(local_tensor(state[moments[0]]))
        if len(moments) > 1:
            self.v.append(local_tensor(state[moments[1]]))
        if self.mode in ("master", "remainder"):
            self.aux.append(local_tensor(state[self.mode]))
        self.steps.append(state["step"])


def mode_of(state: dict[str, Any], shard: torch.Tensor) -> str:
    """The mode (see ``engine.ops.fused``) in which a shard is stepped: by the master in its state, if there is one."""
    kept = next((name for name in ("master", "remainder") if name in state), None)
    return kept or ("random" if shard.dtype == torch.bfloat16 else "plain")


def in_memory_as(gradient: torch.Tensor, shard: torch.Tensor, dense: bool) -> torch.Tensor:
    """The gradient in the memory layout of its shard: kernels go through memory, not through indices."""
    if dense:
        return gradient.contiguous()
    if gradient.stride() == shard.stride():
        return gradient
    return torch.empty_like(shard, dtype=gradient.dtype).copy_(gradient)


def same_objects(these: Collection[Any], those: Collection[Any]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(these) == len(those) and all(map(operator.is_, these, those))
