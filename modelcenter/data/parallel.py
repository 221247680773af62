"""A map over several workers, in order and with bounded memory."""

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
    """function(item) of each item, in order, with `ahead` items in the pool at a time; without a pool, in this thread.

    The results depend on the items alone. An error is raised in the place of its item's result.
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
