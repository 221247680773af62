"""One run at a time in an output folder."""

import multiprocessing
import os
import platform
import re
import shutil

import pytest
from toydata import command, write_folder
from toyruns import short_run_values

from modelcenter.training.output import lock
from modelcenter.training.output.folder import remove_if_empty
from modelcenter.training.output.lock import lock_folder
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27, dev=4)


def _hold(folder, held, done):
    with lock_folder(folder):
        held.set()
        done.wait(30)


def test_a_lock_of_a_file_that_is_gone_is_taken_anew(tmp_path, monkeypatch):
    """Who had it removed the file as this process opened it: the next one would make another."""
    take, tried = lock._lock, []

    def late(file):
        tried.append(file)
        if len(tried) == 1:
            (tmp_path / ".lock").unlink()
        return take(file)

    monkeypatch.setattr(lock, "_lock", late)
    with lock_folder(tmp_path):
        assert len(tried) == 2 and (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_two_runs_do_not_share_a_folder(folder, monkeypatch):
    out = folder / "run"
    out.mkdir()
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(out, held, done))
    other.start()
    assert held.wait(30)
    said = f"output_dir: process {other.pid} on {platform.node()} is training in {out}; wait until it ends"
    with pytest.raises(ValueError, match=re.escape(said)):
        main(command(short_run_values(folder, "run")))
    assert os.listdir(out) == [".lock"]
    done.set()
    other.join()
    assert os.listdir(out) == []
    monkeypatch.setattr("fcntl.lockf", _no_locks)
    with lock_folder(out):
        pass


def test_a_folder_that_its_run_removed_meanwhile_is_made_again(tmp_path, monkeypatch):
    """The lock is of another node, and its run fails while this one waits."""
    out = tmp_path / "runs" / "a"
    with remove_if_empty(out):
        out.mkdir(parents=True)
        (out / ".lock").write_text("process 1 on another")
        answers = iter((False, True))
        monkeypatch.setattr(lock, "_lock", lambda file: next(answers))
        monkeypatch.setattr("time.sleep", lambda seconds: shutil.rmtree(out.parent))
        with lock_folder(out):
            assert os.listdir(out) == [".lock"]
    assert os.listdir(tmp_path) == []


def _no_locks(*_):
    raise OSError(95, "Operation not supported")
