"""Functions that torch.compile leaves out of its graphs, and numbers in the form that graphs take."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.ops import library

_EAGER: dict[str, Callable[..., Any]] = {}


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function to be left out of compiled graphs, because it uses the key of a step or plans in Python."""
    key = f"{function.__module__}.{function.__qualname__}"
    _EAGER[key] = function

    def call(*args: Any, **kwargs: Any) -> Any:
        return _EAGER[key](*args, **kwargs)

    # torch.compile counts recompilations per code object, up to a limit: each wrapper needs its own.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.update_wrapper(call, function)


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; while its caller is being compiled, wrapped so that a call breaks the graph and runs in Python.

    Not a decorator, because that would import the compiler with the module.
    """
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


_ZERO = torch.zeros((), dtype=torch.int64, device="cpu")  # created in a graph it would be a kernel of its own


def host_number(number: int | Tensor) -> Tensor:
    """() int64 on the host: the form in which operators of `engine.ops.graphs` take numbers that are no constants."""
    if isinstance(number, Tensor):
        return number
    return _ZERO if number == 0 else torch.tensor(number, dtype=torch.int64, device="cpu")


@functools.cache
def leave_to_eager() -> None:
    """Tell torch.compile about the functions marked `eager`. Not done at import, because it loads the compiler."""
    # Find out before the first graph which operators are in use; otherwise it would be compiled twice.
    library.serves(torch.device("cpu"))
    if torch.cuda.is_available():
        library.serves(torch.device("cuda", torch.cuda.current_device()))
    for key, function in _EAGER.items():
        _EAGER[key] = torch.compiler.disable(function)
