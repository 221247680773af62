"""Work on a sequence of pieces by several workers, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def ordered_map(
    function: Callable[[A], B], items: Iterable[A], pool: Executor | None = None, ahead: int = 1
) -> Iterator[B]:
    """function(item) of each item, in their order, `ahead` of them at work in the pool at a time; without a pool here.

    What comes out depends on the items alone. An error comes where its item would have.
    """
    if pool is None:
        yield from map(function, items)
        return
    running: deque[Future[B]] = deque()
    try:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
