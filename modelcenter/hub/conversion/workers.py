"""Work on many tensors in several processes: shared out as they become free, with progress; the first error ends it."""

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
    """Whether worker processes may be forked: CUDA is unused, and no other thread works (a progress bar's may wait)."""
    others = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    return not others and not torch.cuda.is_initialized()


def imap_unordered(
    work: Work, items: Sequence[Any], workers: int, progress: Progress, peaks: list[int] | None = None
) -> Iterator[tuple[int, Any]]:
    """Do `work(item, report)` for every item; yields (index, result) as they come.

    With one worker, or where forking is not safe, in this process; else in `workers` forked ones, which take the next
    item when they are free. What `work` refers to is inherited, not sent.

    Args:
        peaks: gets the largest resident size of each worker, in bytes.

    Raises:
        ValueError, OSError: as a worker raised it. ChildProcessError: one died. The other workers are ended.
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
    """Tell glibc to use freed buffers again and not to fetch pages anew for each, which costs as much as reading."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, at most this
        set_option(-1, 512 * 2**20)  # M_TRIM_THRESHOLD


def make_lock() -> AbstractContextManager[Any]:
    """A lock among the forked workers. (Where two write one file, the kernel's own makes the waiting one spin.)"""
    if not can_fork():
        return threading.Lock()
    try:
        return multiprocessing.get_context("fork").Lock()
    except OSError:  # containers without a /dev/shm that can be written: only the waiting costs more
        return contextlib.nullcontext()


@contextlib.contextmanager
def flushing(files: Sequence[Path], pause: float = 0.2) -> Iterator[None]:
    """Bring files to the disk while they are being written, by a process of its own, so that no one waits at the end.

    Does nothing where forking is not safe.
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
            with contextlib.suppress(OSError):  # whoever writes the file reports it
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
                elif kind == "peak":  # the last that a worker says
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
    """Send a worker its next item, or None at the end. Of one that has died, recv says so."""
    with contextlib.suppress(ConnectionError):
        pipe.send(waiting.pop() if waiting else None)


def _died(status: int) -> str:
    if status == -signal.SIGKILL:
        return "a worker process was killed, perhaps for want of memory: use fewer with --workers"
    return f"a worker process ended with status {status}"


def _worker(work: Work, items: Sequence[Any], pipe: Any, others: Sequence[Any]) -> None:
    for other in others:
        other.close()  # so that this process ends when its parent does
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    torch.set_num_threads(1)
    keep_memory()
    status = 1
    with contextlib.suppress(BrokenPipeError, ConnectionError, EOFError):  # the parent is gone
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
    os._exit(status)  # nothing of the parent's is to be run or flushed here
