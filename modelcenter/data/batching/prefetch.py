"""Computing items ahead of time in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """The items of an iterable, in order, with up to `depth` of them computed ahead.

    A single thread computes them, so the items do not depend on it; numpy, tokenizers and PyTorch release the GIL, so
    it runs in parallel with a step. An error of the iterable is raised in place of its item. After leaving a loop
    early, `close`, or a `with` block, ends the thread before its next item.

    Raises:
        ValueError: depth is less than 1.
    """

    def __init__(self, items: Iterable[T], depth: int = 2):
        if depth < 1:
            raise ValueError(f"prefetch depth: got {depth}, expected at least 1")
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._make, args=(items,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        kind, value = self._queue.get()
        if kind == "item":
            return value
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """End the thread and drop its items. Waits for the item in progress."""
        self._ended = True
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)  # room for a thread that waits for some
            except queue.Empty:
                pass

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, items: Iterable[T]) -> None:
        iterator = None
        try:
            iterator = iter(items)
            for item in iterator:
                self._put("item", item)
                if self._closed.is_set():
                    break
            else:
                self._put("end", None)
        except BaseException as error:  # the consumer must get any error, or it would wait forever
            self._put("error", error)
        finally:
            if isinstance(iterator, Generator):  # its `finally` blocks run here, in the thread that ran it
                iterator.close()

    def _put(self, kind: str, value: Any) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put((kind, value), timeout=0.1)
            except queue.Full:
                pass
