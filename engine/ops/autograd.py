"""What the autograd functions of operators share."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from engine.torch_compat import in_function_transform


class Function(torch.autograd.Function):
    """torch's, for operators that every layer calls: no subclass has a ``setup_context``.

    For those that have, torch's ``apply`` looks in Python at itself and at each argument, which takes a third of the
    time of a call; where a model is small, and always on a GPU, that is a step's time. Not for what torch.compile takes
    into its graphs.
    """

    _apply: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._apply = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if in_function_transform():  # about which torch's raises
            return super().apply(*args)
        return cls._apply(*args)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise an error for a second derivative, as ``create_graph=True`` asks for.

    torch's decorator of this name notices it if the gradient that comes in has one, and only in ``backward``. But what
    comes out depends on the inputs of forward too: it would be taken for a constant, without a word.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{backward.__qualname__.partition('.')[0].strip('_')} has no second derivative, for which "
                "create_graph=True asks: leave it out, or use torch's own operators"
            )
        return backward(ctx, *grads)

    return call
