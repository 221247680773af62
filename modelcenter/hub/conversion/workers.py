"""Working on many tensors in several processes, each of which takes the next when free; the first error stops all."""

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from engine.memory import peak_resident
from modelcenter.hub.conversion.progress import Progress, Report

Work = Callable[[Any, Report], Any]


def can_fork() -> bool:
    """Whether worker processes may be forked: CUDA is unused, and no other thread runs (a progress bar's may wait)."""
    others = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    return not others and not torch.cuda.is_initialized()


def imap_unordered(
    work: Work, items: Sequence[Any], workers: int, progress: Progress, peaks: list[int] | None = None
) -> Iterator[tuple[int, Any]]:
    """Call `work(item, report)` for every item; yields (index, result) in the order of completion.

    With one worker, or if forking is not safe, this happens in this process; else in `workers` forked ones, each of
    which takes the next item when free. Objects that `work` refers to are inherited, not sent.

    Args:
        peaks: receives the maximum resident size of each worker, in bytes.

    Raises:
        ValueError, OSError: raised by a worker. ChildProcessError: a worker died. The other workers are killed.
    """
    workers = min(workers, len(items))
    if workers > 1 and can_fork():
        yield from _forked(work, items, workers, progress, peaks)
        return
    for index, item in enumerate(items):
        yield index, work(item, progress.add)
    if peaks is not None:
        peaks.append(peak_resident())


def keep_memory() -> None:
    """Tell glibc to reuse freed buffers, instead of getting new pages for each, which costs as much as reading."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, at its maximum
        set_option(-1, 512 * 2**20)  # M_TRIM_THRESHOLD


def make_lock() -> AbstractContextManager[Any]:
    """A lock shared by forked workers. (If two write to one file, the kernel's own lock makes the waiting one spin.)"""
    if not can_fork():
        return threading.Lock()
    try:
        return multiprocessing.get_context("fork").Lock()
    except OSError:  # a container without a writable /dev/shm: waiting only costs more
        return contextlib.nullcontext()


@contextlib.contextmanager
def flushing(files: Sequence[Path], pause: float = 0.2) -> Iterator[None]:
    """Flush files to the disk while they are being written, in a separate process, so that nothing is left for the end.

    Does nothing if forking is not safe.
    """
    if not can_fork():
        yield
        return
    process = multiprocessing.get_context("fork").Process(target=_flush, args=(files, pause), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _flush(files: Sequence[Path], pause: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(pause)
        for path in files:
            with contextlib.suppress(OSError):  # the process that writes the file reports it
                with open(path, "rb") as file:
                    os.fdatasync(file.fileno())


def _forked(
    work: Work, items: Sequence[Any], workers: int, progress: Progress, peaks: list[int] | None
) -> Iterator[tuple[int, Any]]:
    context = multiprocessing.get_context("fork")
    running: dict[Any, Any] = {}
    waiting = list(reversed(range(len(items))))
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_worker, args=(work, items, there, [here, *running]), daemon=True)
            process.start()
            there.close()
            running[here] = process
            _give(here, waiting)
        while running:
            ready: list[Any] = multiprocessing.connection.wait(list(running))
            for pipe in ready:
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionError):
                    running[pipe].join()
                    raise ChildProcessError(_died(running[pipe].exitcode)) from None
                if kind == "progress":
                    progress.add(value)
                elif kind == "error":
                    raise value
                elif kind == "peak":  # a worker's last message
                    running.pop(pipe).join()
                    if peaks is not None:
                        peaks.append(value)
                else:
                    _give(pipe, waiting)
                    yield value
    finally:
        for process in running.values():
            process.kill()
        for process in running.values():
            process.join()


def _give(pipe: Any, waiting: list[int]) -> None:
    """Send a worker its next item, or None at the end. If it has died, recv reports it."""
    with contextlib.suppress(ConnectionError):
        pipe.send(waiting.pop() if waiting else None)


def _died(status: int) -> str:
    if status == -signal.SIGKILL:
        return "a worker process was killed, perhaps because memory ran out: use fewer with --workers"
    return f"a worker process ended with status {status}"


def _worker(work: Work, items: Sequence[Any], pipe: Any, others: Sequence[Any]) -> None:
    for other in others:
        other.close()  # so that this process ends when its parent does
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    torch.set_num_threads(1)
    keep_memory()
    status = 1
    with contextlib.suppress(BrokenPipeError, ConnectionError, EOFError):  # the parent has died
        try:
            while (index := pipe.recv()) is not None:
                pipe.send(("done", (index, work(items[index], lambda count: pipe.send(("progress", count))))))
            pipe.send(("peak", peak_resident()))
            status = 0
        except (BrokenPipeError, ConnectionError, EOFError):
            raise
        except Exception as error:
            kind = type(error) if type(error) in (ValueError, RuntimeError) else None
            if isinstance(error, OSError):
                pipe.send(("error", OSError(error.errno, error.strerror, error.filename)))
            else:
                pipe.send(("error", kind(str(error)) if kind else RuntimeError(f"{type(error).__name__}: {error}")))
    os._exit(status)  # skips the parent's exit handlers and buffers
