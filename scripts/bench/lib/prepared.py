"""Processes that import their packages at the same time, and then run one after another."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from scripts.bench.lib import ROOT, child_environment

READY = "ready"


class Prepared:
    """`count` processes of a script, started when the first is needed. A process is idle between its imports and its
    turn, and no turn begins before all imports are done, so none disturbs the measurements of another."""

    def __init__(self, words: Sequence[str], count: int, threads: int) -> None:
        self._command, self._count = [sys.executable, *words], count
        self._environment = child_environment(threads)
        self._waiting: list[tuple[subprocess.Popen[str], Any]] = []

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(self, *_: object) -> None:
        for process, errors in self._waiting:
            process.kill()
            process.communicate()
            errors.close()

    def run(self, told: Any, timeout: float = 900) -> dict[str, Any]:
        """Give this message to the next process, and return the JSON that it prints.

        Raises:
            RuntimeError: the process fails or exceeds `timeout` seconds.
        """
        if not self._waiting:
            self._waiting = [self._start() for _ in range(self._count)]
            for process, _ in self._waiting:
                assert process.stdout is not None
                process.stdout.readline()
            self._count = 1
        process, errors = self._waiting.pop()
        watch = threading.Timer(timeout, process.kill)
        watch.start()
        out, _ = process.communicate(json.dumps(told) + "\n")
        stopped = not watch.is_alive()
        watch.cancel()
        with errors:
            errors.seek(0)
            if process.returncode:
                ended = f"was killed after {timeout:.0f} s" if stopped else f"ended with {process.returncode}"
                raise RuntimeError(f"{' '.join(self._command[1:])[:200]}, {told} {ended}:\n{errors.read()[-4000:]}")
        result: dict[str, Any] = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
        return result

    def _start(self) -> tuple[subprocess.Popen[str], Any]:
        errors = tempfile.TemporaryFile("w+")
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=self._environment,
            cwd=ROOT, text=True,
        )  # fmt: skip
        return process, errors


def serve(answer: Callable[[Any], dict[str, Any]]) -> None:
    """In such a process, after its imports: wait for a message, and print `answer` of it; nothing if none comes."""
    print(READY, flush=True)
    if line := sys.stdin.readline():
        print(json.dumps(answer(json.loads(line))))
