"""A decorator for autograd functions that have no second derivative."""

import functools
from collections.abc import Callable
from typing import Any

import torch


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
