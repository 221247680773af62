"""Functions that torch.compile leaves out of its graphs."""

import functools
from collections.abc import Callable
from typing import Any

import torch

_EAGER: dict[str, Callable[..., Any]] = {}


def eager(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """`function`, left out of compiled graphs: for one that takes the key of a step or plans in Python."""
    key = name or f"{function.__module__}.{function.__qualname__}"
    _EAGER[key] = function

    def call(*args: Any, **kwargs: Any) -> Any:
        return _EAGER[key](*args, **kwargs)

    # torch.compile counts by code how often it had to compile for other arguments, and at some number it stops.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.update_wrapper(call, function)


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; where its caller is being compiled, as a call that ends the graph and runs in Python.

    Not a decorator, which would load the compiler with the function.
    """
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


@functools.cache
def leave_to_eager() -> None:
    """Tell torch.compile about the functions marked `eager`; not at import, as it loads the compiler."""
    for key, function in _EAGER.items():
        _EAGER[key] = torch.compiler.disable(function)
