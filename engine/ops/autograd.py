"""The base of the operators' autograd functions."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from engine.torch_compat import in_function_transform


class Function(torch.autograd.Function):
    """torch.autograd.Function with a faster ``apply``, for operators that every layer calls. No subclass may define
    ``setup_context``.

    torch's ``apply`` handles functions with ``setup_context`` in Python and checks each argument, a third of the time
    of a call; a small model, and any model on a GPU, waits for that time in each step. Not for functions that
    torch.compile traces into its graphs.
    """

    _apply: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._apply = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if in_function_transform():  # torch's own apply raises the error
            return super().apply(*args)
        return cls._apply(*args)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise an error when ``create_graph=True`` asks for a second derivative.

    torch's decorator of this name only raises if the incoming gradient requires grad, and only in the second backward.
    But the result depends on the inputs of forward too, and would silently be treated as a constant.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{backward.__qualname__.partition('.')[0].strip('_')} has no second derivative, which "
                "create_graph=True needs: leave it out, or use torch's own operators"
            )
        return backward(ctx, *grads)

    return call
