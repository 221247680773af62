"""Processes that share the work of a conversion: errors, ends, interruptions, and when there are none."""

import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess

import pytest

from modelcenter.hub.conversion import workers
from modelcenter.hub.conversion.progress import Progress
from modelcenter.hub.conversion.workers import imap_unordered


def test_a_program_without_an_output_has_workers(monkeypatch):
    """As Python starts where its standard streams are closed."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    done = imap_unordered(lambda item, report: -item, (1, 2), 2, Progress("testing", 2, shown=False))
    assert sorted(done) == [(0, -1), (1, -2)]


@pytest.mark.parametrize("end, status", [("kill", "was killed"), ("terminate", "ended with status 0")])
def test_a_worker_that_dies_while_it_waits(end, status, monkeypatch):
    """The item that it is given then is not done, whatever it ended with."""
    others, kept = set(multiprocessing.active_children()), multiprocessing.connection.wait

    def work(item, report):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        return item

    def wait_and_end(pipes):
        for pipe in pipes:
            kept([pipe])  # until it has done an item
        for process in set(multiprocessing.active_children()) - others:
            getattr(process, end)()
            process.join()
        return pipes

    monkeypatch.setattr(multiprocessing.connection, "wait", wait_and_end)
    with pytest.raises(ChildProcessError, match=f"a worker process {status}"):
        list(imap_unordered(work, range(4), 2, Progress("testing", 4, shown=False)))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("damaged"), ValueError, "^damaged$"),
        (OSError(28, "No space left on device", "file"), OSError, "No space left on device: 'file'"),
        (RuntimeError("of torch"), RuntimeError, "^of torch$"),
        (KeyError("x"), RuntimeError, "^KeyError: 'x'$"),
    ],
)
def test_an_error_of_a_worker_is_raised_and_ends_the_others(error, kind, said):
    began = time.monotonic()

    def work(item, report):
        if item == 0:
            raise error
        time.sleep(20)
        os._exit(0)

    with pytest.raises(kind, match=said):
        list(imap_unordered(work, range(4), 2, Progress("testing", 4, shown=False)))
    assert time.monotonic() - began < 15


def test_workers_leave_interruptions_to_their_parent():
    ignored = imap_unordered(
        lambda item, report: signal.getsignal(signal.SIGINT) == signal.SIG_IGN, (1, 2), 2, Progress("testing", 2, False)
    )
    assert sorted(ignored) == [(0, True), (1, True)]


def test_nothing_is_forked_beside_a_thread_that_works():
    """It may hold a lock, which nobody would release in the fork. One that may end with the program does not count."""
    go_on = threading.Event()
    for daemon in (True, False):
        thread = threading.Thread(target=go_on.wait, args=(30,), daemon=daemon)
        thread.start()
        assert workers.can_fork() == daemon
    go_on.set()
    thread.join()
    assert workers.can_fork()


def test_a_worker_that_dies_before_its_first_item(monkeypatch):
    kept = BaseProcess.start

    def start_and_wait(process):
        kept(process)
        process.join()

    monkeypatch.setattr(BaseProcess, "start", start_and_wait)
    monkeypatch.setattr(workers, "_worker", lambda *_: os._exit(0))
    with pytest.raises(ChildProcessError, match="a worker process ended with status 0"):
        list(imap_unordered(lambda item, report: item, range(4), 2, Progress("testing", 4, shown=False)))
