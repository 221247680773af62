"""Tensors that backward makes again instead of keeping them.

A product keeps its input for the gradient of its weight. Where that is a norm or an activation, it takes no longer to
make again than memory does, and what it is made of is kept anyhow, for its own gradient; and a 16-bit cast of a
parameter is made again from the parameter. Within `remaking`, operators note how an output was made (`note`), and an
autograd function that would keep such a tensor keeps what it was made of (`keep`, `kept`). The same operator makes it
from the same numbers, so gradients have the bits that they have without.
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
# The place of a tensor among those that are kept, or how to make one from others.
_Plan: TypeAlias = "int | tuple[Make, list[_Plan]]"

_NOTE = "_modelcenter_recipe"


@dataclass(frozen=True, slots=True)
class _Recipe:
    make: Make
    tensors: tuple[Tensor | None, ...]
    version: int  # of what was made: once that is changed in place, it is no more what this makes

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing: who stores a tensor stores its attributes, and torch.load takes few kinds of them."""
        return OrderedDict, ()


class _State(threading.local):
    on = False
    hooks: Any = None  # around the forward


_state = _State()


@contextmanager
def remaking() -> Iterator[None]:
    """Inside, a forward in this thread lets backward make again what is cheap to make."""
    before = _state.on, _state.hooks
    _state.on, _state.hooks = True, saved_tensors_hooks()
    try:
        yield
    finally:
        _state.on, _state.hooks = before


def is_on(x: Tensor) -> bool:
    """Whether what is made of x is to be made again.

    Not what is no ordinary tensor, nor under autocast, which backward has no more. What is being compiled is the
    compiler's to decide; what is kept by way of hooks of its own is that of who has set these, as
    ``torch.utils.checkpoint``, which counts what is kept when it computes it again.
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
    """Whether this is within `remaking`."""
    return _state.on


def note(out: Tensor, make: Make, *tensors: Tensor | None) -> Tensor:
    """out, with a note that it is make(*tensors), where that is to be made again.

    Args:
        make: an operator that gives the same bits for the same numbers, and draws none. It is called without gradients.
        tensors: what it takes; what has a note itself may be made again in turn.
    """
    if is_on(out):
        attach(out, make, *tensors)
    return out


def attach(out: Tensor, make: Make, *tensors: Tensor | None) -> None:
    """`note`, by who has asked `is_on` before: within an autograd function's forward, where gradients are off."""
    setattr(out, _NOTE, _Recipe(make, tensors, out._version))


def _recipe(tensor: Tensor) -> _Recipe | None:
    found: _Recipe | None = getattr(tensor, _NOTE, None)
    return found if type(found) is _Recipe and found.version == tensor._version else None


def is_noted(tensor: Tensor) -> bool:
    """Whether `keep` would keep something else in its place."""
    return _recipe(tensor) is not None


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """`ctx.save_for_backward`, of what the tensors are made of where they are made again. Called once in a forward."""
    for tensor in tensors:
        if tensor is not None and is_noted(tensor):
            break
    else:  # every product of a step comes here
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
    """The tensors that `keep` was given, in a backward without gradients of its own."""
    saved = ctx.saved_tensors
    return saved if ctx.plans is None else [_made(plan, saved) for plan in ctx.plans]


def _made(plan: _Plan, saved: tuple[Tensor | None, ...]) -> Tensor | None:
    if isinstance(plan, int):
        return saved[plan]
    make, parts = plan
    return make(*(_made(part, saved) for part in parts))
