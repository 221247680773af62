"""Run a function on N ranks of this machine, without a launcher or a GPU.

::

    def check(dim):
        engine.init_distributed(zero_level=2)
        ...
        return engine.rank()

    engine.testing.run(check, 2, 16)            # [0, 1]

    with engine.testing.Pool(2) as pool:        # the same ranks for many calls
        pool.run(check, 16)

Ranks are forked from this process, so they need not import again what it has imported. They have a launcher's
environment variables and have already met over gloo. A rank that raises, dies or hangs ends the call with an error that
names it.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from engine import runtime
from engine.startup import init_distributed

_LOST = re.compile(r"connection (closed|reset|was)|broken pipe|peer", re.IGNORECASE)
_CRASH = "Fatal Python error"  # how faulthandler begins
_GRACE = 2.0  # seconds that the other ranks get to report after one has failed


def run(fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``fn(*args)`` on ``ranks`` fresh ranks. Returns what each rank returned, in rank order.

    ``fn`` may be any function, even a closure; what it returns must pickle.

    Raises:
        RuntimeError: a rank raised or died. The message has its traceback, or where it crashed.
        TimeoutError: ranks had not finished after ``timeout`` seconds. The message says where each one was.
    """
    with Pool(ranks, timeout=timeout) as pool:
        pool._start(call=(fn, args))
        return pool._collect(_name(fn), timeout)


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Pretend to be one of ``world_size`` ranks: a dry run of any mesh in one process.

    Collectives return at once and move nothing, so shapes, placements and memory are right, and values are not. Inside,
    call ``engine.init_distributed(...)`` as usual. Raises ValueError if the process has a process group.
    """
    if dist.is_initialized():
        raise ValueError("fake_ranks needs a process without a process group")
    if not isinstance(world_size, int) or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of world_size {world_size}, expected 0 to world_size - 1")
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    before = runtime.configure(runtime.Runtime())
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        init_distributed(device="cpu")
        yield
    finally:
        dist.destroy_process_group()
        runtime.configure(before)


class Pool:
    """Forked ranks that are kept for many calls, which saves starting them for each.

    After a failed call, or for a function from a module that was imported since, the ranks are restarted. Use the pool
    as a context manager, or call ``close``.
    """

    def __init__(self, ranks: int, timeout: float = 60.0) -> None:
        """``timeout`` in seconds is the limit of each call, and of a collective inside it."""
        if not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"ranks is {ranks!r}, expected a whole number of at least 1")
        self.ranks = ranks
        self.timeout = timeout
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._modules: frozenset[str] = frozenset()
        self._store: dist.TCPStore | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """As ``run``, on the kept ranks. ``fn`` and ``args`` must pickle, so ``fn`` must be a module-level function."""
        try:
            message = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{_name(fn)} or its arguments do not pickle ({error}): Pool.run takes functions defined at the top "
                "of a module; engine.testing.run takes any"
            ) from None
        if not self._workers or fn.__module__ not in self._modules:
            self.close()
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(message)
        return self._collect(_name(fn), self.timeout if timeout is None else timeout)

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
        if self._scratch is not None:
            self._scratch.cleanup()
        self._workers, self._pipes, self._store, self._scratch = [], [], None, None

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None) -> None:
        if torch.cuda.is_initialized():
            raise RuntimeError("engine.testing forks its ranks, which CUDA forbids once this process has used it")
        if dist.is_initialized():
            raise RuntimeError(
                "engine.testing forks its ranks, which would inherit the process group of this process: call "
                "torch.distributed.destroy_process_group() first"
            )
        # FSDP is imported before the fork, once for all ranks and all later pools.
        importlib.import_module("engine.parallel.shard")
        self._modules = frozenset(sys.modules)
        self._scratch = tempfile.TemporaryDirectory(prefix="engine-ranks-")
        context = multiprocessing.get_context("fork")
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank is a client of the store made below
            }
            stacks = str(self._stack_file(rank))
            worker = context.Process(
                target=_worker, args=(theirs, environment, stacks, self.timeout, call), daemon=True, name=f"rank-{rank}"
            )
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)
        # The system chooses the store's port, which is handed to the ranks, so that no two runs can collide. The store
        # is made after the forks: a rank that is forked while the store's thread answers another one may inherit a lock
        # of the C library that nobody in it will ever release.
        limit = datetime.timedelta(seconds=self.timeout)
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=limit, wait_for_workers=False)
        for pipe in self._pipes:
            pipe.send_bytes(str(self._store.port).encode())

    def _collect(self, what: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = set(range(self.ranks))
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = multiprocessing.connection.wait([self._pipes[r] for r in waiting], left)
            for rank in sorted(r for r in waiting if self._pipes[r] in ready):
                waiting.discard(rank)
                try:
                    good, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._workers[rank].join(1.0)
                    good, value = False, f"died: {_exit_text(self._workers[rank].exitcode)}\n{self._last_words(rank)}"
                if good:
                    results[rank] = value
                else:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + _GRACE)
                    failures[rank] = value
        if not waiting and not failures:
            return [results[rank] for rank in range(self.ranks)]
        stacks = self._stacks(waiting)
        self.close()
        if not failures:
            names = ", ".join(map(str, sorted(waiting)))
            raise TimeoutError(f"{what}: rank {names} of {self.ranks} had not ended after {timeout:g} s\n{stacks}")
        # The first to fail is the cause, unless it reports that it lost another rank, whose end is noticed later.
        first, *others = sorted(failures, key=lambda rank: _lost_another(failures[rank]))
        text = f"{what}: rank {first} of {self.ranks} {failures[first]}"
        text += "".join(f"rank {rank} then {_in_a_line(failures[rank])}\n" for rank in others)
        raise RuntimeError(text + stacks)

    def _last_words(self, rank: int) -> str:
        """The Python stacks of a rank that crashed."""
        _, crash, stacks = self._written_stacks(rank).partition(_CRASH)
        return crash + stacks

    def _written_stacks(self, rank: int) -> str:
        file = self._stack_file(rank)
        return file.read_text() if file.exists() else ""

    def _stack_file(self, rank: int) -> Path:
        assert self._scratch is not None
        return Path(self._scratch.name, f"stack-{rank}")

    def _stacks(self, waiting: set[int]) -> str:
        """The Python stack of each rank that still runs."""
        for rank in waiting:
            if self._workers[rank].is_alive():
                os.kill(self._workers[rank].pid or 0, signal.SIGUSR1)
        if waiting:
            time.sleep(0.3)
        text = ""
        for rank in sorted(waiting):
            where = self._written_stacks(rank).split("/engine/testing.py", 1)[0].rpartition("\n")[0]
            text += f"rank {rank} was still here:\n{where}\n"
        return text


def _worker(
    pipe: multiprocessing.connection.Connection,
    environment: dict[str, str],
    stacks: str,
    timeout: float,
    call: tuple[Callable[..., Any], tuple[Any, ...]] | None,
) -> None:
    """The main function of a rank. Ends in ``os._exit``, because the parent's exit handlers must not run here."""
    gc.freeze()  # garbage of the parent may include process groups, whose threads do not exist here
    parent = os.getppid()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        faulthandler.enable(file)
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
        torch.set_num_threads(1)
        try:
            os.environ["MASTER_PORT"] = pipe.recv_bytes().decode()
            _join(timeout)
            if call is not None:
                pipe.send_bytes(_answer(*call))
            while call is None:
                fn, args = pickle.loads(pipe.recv_bytes())
                _join(timeout)  # each call starts from the same settings and seed
                pipe.send_bytes(_answer(fn, args))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the pool was closed
        except Exception:
            pipe.send_bytes(pickle.dumps((False, f"raised\n{traceback.format_exc()}")))
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by whoever started the program
                stream.flush()
            os._exit(0)


def _join(timeout: float) -> None:
    runtime.configure(runtime.Runtime())  # not the settings of the parent or of an earlier call
    init_distributed(device="cpu", timeout=timeout)


def _answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        answer = io.BytesIO()
        _Pickler(answer).dump((True, fn(*args)))
        return answer.getvalue()
    except BaseException:  # even SystemExit: the rank has not done what it was called for
        return pickle.dumps((False, f"raised\n{traceback.format_exc()}"))


class _Pickler(pickle.Pickler):
    """Pickles the elements of tensors: torch writes a file for each, which can take as long as the call itself."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        plain = value.layout is torch.strided and value.device.type == "cpu"
        special = value.is_complex() or value.is_neg() or value.is_quantized or value.is_nested
        if not plain or special or value.requires_grad or vars(value):
            return NotImplemented
        elements = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor_of, (elements, value.dtype, tuple(value.shape))


def _tensor_of(elements: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not elements:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(elements), dtype=dtype).reshape(shape)


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


def _lost_another(failure: str) -> bool:
    return failure.startswith("raised") and _LOST.search(failure) is not None


def _in_a_line(failure: str) -> str:
    lines = failure.strip().splitlines()
    return lines[0] if failure.startswith("died") else lines[-1]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
