"""An ordered parallel map with bounded memory, and worker processes for it."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

A = TypeVar("A")
B = TypeVar("B")


def ordered_map(
    function: Callable[[A], B], items: Iterable[A], pool: Executor | None = None, ahead: int = 1
) -> Iterator[B]:
    """function(item) for each item, in order, with up to `ahead` items in the pool; without a pool, in this thread.

    The results depend only on the items. An error is raised when its item's result would be yielded.
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


@contextmanager
def in_processes(function: Callable[[A], B], count: int) -> Iterator[Callable[[A], B]]:
    """Yields a version of the function that up to `count` threads may call at a time, each call in another process.

    Each process has its own pipe, so that a killed process is an error at once. The workers of ProcessPoolExecutor
    share pipes: if one is killed while it writes, the parent waits forever.

    Raises:
        ValueError: when called, if a process has ended.
    """
    # Spawned, not forked: the threads of a tokenizer or of PyTorch do not survive a fork.
    context = multiprocessing.get_context("spawn")
    workers: list[tuple[Any, Any]] = []
    idle: SimpleQueue[tuple[Any, Any]] = SimpleQueue()

    def call(item: A) -> B:
        process, pipe = worker = idle.get()
        try:
            pipe.send(item)
            result, error = pipe.recv()
        except (EOFError, OSError):
            process.join()
            raise ValueError(
                f"--workers: one of the {count} processes ended with exit code {process.exitcode}"
                + (" (killed, perhaps because memory ran out: give fewer)" if process.exitcode == -9 else "")
            ) from None
        finally:
            idle.put(worker)
        if error is not None:
            raise error
        return result

    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            with theirs:
                process = context.Process(target=_serve, args=(function, theirs), daemon=True)
                process.start()
            workers.append((process, ours))
            idle.put(workers[-1])
        yield call
    finally:
        for process, pipe in workers:
            process.kill()
            process.join()
            pipe.close()


def _serve(function: Callable[[A], B], pipe: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the parent has ended, and reports any error
        while True:
            item = pipe.recv()
            try:
                result, error = function(item), None
            except Exception as raised:
                result, error = None, raised
            pipe.send((result, error))
