"""What torch.compile takes into its graphs in another form, and what it leaves out of them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.ops import library

_EAGER: dict[str, Callable[..., Any]] = {}


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, left out of compiled graphs: for one that takes the key of a step or plans in Python."""
    key = f"{function.__module__}.{function.__qualname__}"
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


_ZERO = torch.zeros((), dtype=torch.int64, device="cpu")  # made in a graph it would be a kernel of its own


def host_number(number: int | Tensor) -> Tensor:
    """() int64 on the host, as the operators of `engine.ops.graphs` take what is not to be a constant of a graph."""
    if isinstance(number, Tensor):
        return number
    return _ZERO if number == 0 else torch.tensor(number, dtype=torch.int64, device="cpu")


@functools.cache
def leave_to_eager() -> None:
    """Tell torch.compile about the functions marked `eager`; not at import, as it loads the compiler."""
    # Which operators are in use: known before the first graph, which would be made twice.
    library.serves(torch.device("cpu"))
    if torch.cuda.is_available():
        library.serves(torch.device("cuda", torch.cuda.current_device()))
    for key, function in _EAGER.items():
        _EAGER[key] = torch.compiler.disable(function)
