"""Tensors that backward recomputes instead of keeping them.

A matrix product keeps its input for the gradient of its weight. If that is the output of a norm or an activation,
recomputing it only costs memory traffic, and its own inputs are kept anyway, for its own gradient. Likewise, a 16-bit
cast is recomputed from its parameter. Inside `remaking`, operators note how an output was made (`note`), and an
autograd function that would keep such a tensor keeps its inputs instead (`keep`, `kept`). The same operator recomputes
it from the same inputs, so gradients have the same bits.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from engine.ops import library
from engine.torch_compat import in_function_transform, saved_tensors_hooks

Make = Callable[..., Tensor]
# The index of a tensor among the kept ones, or an operator and the plans of its inputs.
_Plan: TypeAlias = "int | tuple[Make, list[_Plan]]"

_NOTE = "_modelcenter_recipe"


@dataclass(frozen=True, slots=True)
class _Recipe:
    make: Make
    tensors: tuple[Tensor | None, ...]
    version: int  # of the output: once it is changed in place, the recipe no longer applies

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty dict: torch.save stores the attributes of a tensor, and torch.load allows few types."""
        return OrderedDict, ()


class _State(threading.local):
    on = False
    hooks: Any = None  # those in force around the forward


_state = _State()


@contextmanager
def remaking() -> Iterator[None]:
    """Inside, a forward in this thread lets backward recompute what is cheap to compute."""
    before = _state.on, _state.hooks
    _state.on, _state.hooks = True, saved_tensors_hooks()
    try:
        yield
    finally:
        _state.on, _state.hooks = before


def is_on(x: Tensor) -> bool:
    """Whether outputs computed from x are to be recomputed.

    False for tensor subclasses, and under autocast, which is off in backward. Inside torch.compile the compiler decides
    what to recompute. Under other saved-tensor hooks their owner decides, such as ``torch.utils.checkpoint``, which
    counts the saved tensors when it recomputes.
    """
    return (
        _state.on
        and type(x) in library.PLAIN
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and (x.is_meta or not torch.is_autocast_enabled(x.device.type))
        and not in_function_transform()
        and saved_tensors_hooks() == _state.hooks
    )


def in_force() -> bool:
    """Whether the code runs inside `remaking`."""
    return _state.on


def note(out: Tensor, make: Make, *tensors: Tensor | None) -> Tensor:
    """Return out, with a note that it is make(*tensors) if it is to be recomputed.

    Args:
        make: a deterministic operator: the same inputs give the same bits. It is called without gradients.
        tensors: its inputs; those with a note of their own may be recomputed in turn.
    """
    if is_on(out):
        attach(out, make, *tensors)
    return out


def attach(out: Tensor, make: Make, *tensors: Tensor | None) -> None:
    """`note` without the check of `is_on`, which fails in the forward of an autograd function: check before it."""
    setattr(out, _NOTE, _Recipe(make, tensors, out._version))


def _recipe(tensor: Tensor) -> _Recipe | None:
    found: _Recipe | None = getattr(tensor, _NOTE, None)
    return found if type(found) is _Recipe and found.version == tensor._version else None


def is_noted(tensor: Tensor) -> bool:
    """Whether `keep` would keep other tensors in place of this one."""
    return _recipe(tensor) is not None


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """`ctx.save_for_backward`, with the inputs of tensors that are recomputed. Call it once in a forward."""
    for tensor in tensors:
        if tensor is not None and is_noted(tensor):
            break
    else:  # the fast path, which every product of a step takes
        ctx.save_for_backward(*tensors)
        ctx.plans = None
        return
    flat: list[Tensor | None] = []
    ctx.plans = [_plan(tensor, flat) for tensor in tensors]
    ctx.save_for_backward(*flat)


def _plan(tensor: Tensor | None, flat: list[Tensor | None]) -> _Plan:
    recipe = None if tensor is None else _recipe(tensor)
    if recipe is not None:
        return recipe.make, [_plan(part, flat) for part in recipe.tensors]
    flat.append(tensor)
    return len(flat) - 1


def kept(ctx: Any) -> Any:
    """The tensors that `keep` was given, for a backward that is not differentiated itself."""
    saved = ctx.saved_tensors
    return saved if ctx.plans is None else [_made(plan, saved) for plan in ctx.plans]


def _made(plan: _Plan, saved: tuple[Tensor | None, ...]) -> Tensor | None:
    if isinstance(plan, int):
        return saved[plan]
    make, parts = plan
    return make(*(_made(part, saved) for part in parts))
