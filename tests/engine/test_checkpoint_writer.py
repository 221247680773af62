"""A checkpoint is written beside training: from a copy of its own, and what fails is told on every rank."""

import gc
import os
import signal
import threading
import time
import warnings
import weakref
from types import SimpleNamespace
from unittest import mock

import engine_toys as toys
import pytest
import torch
import torch.distributed.checkpoint
from checkpoint_toys import Run, on
from directory_toys import files_of_at_most, names

import engine
from engine import background
from engine.checkpoint import training as module


def test_the_staged_copy_is_one_and_shares_nothing():
    run = Run(3, 1)
    run.step(0)
    for tensor in engine.checkpoint.named_tensors(run.model).values():
        copy_ = module._staged(tensor)
        assert torch.equal(copy_, tensor) and copy_.data_ptr() != tensor.data_ptr()


def test_nothing_of_the_staged_copy_stays_when_it_is_written(tmp_path, monkeypatch):
    """Until the next save: it is as large as the model and its optimizer."""
    staged, known = module._staged, []

    def noted(tensor):
        copied = staged(tensor)
        known.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(module, "_staged", noted)
    run = Run(3, 1)
    run.step(0)
    engine.save_checkpoint(tmp_path / "c", run.model, run.manager, asynchronous=True, extra=lambda path: None)
    module._writer.join()
    gc.collect()
    assert known and not any(reference() is not None for reference in known)
    engine.wait_checkpoint()


def test_nothing_of_the_staged_copy_stays_when_it_cannot_be_written(tmp_path, monkeypatch):
    """The error that is kept has frames, which hold it, and so have its causes'."""
    known = []

    def look_up():
        held = [torch.ones(3)]
        known.append(weakref.ref(held[0]))
        raise KeyError(len(held))

    def fail(path, tensors, group):
        known.extend(weakref.ref(tensor) for tensor in tensors.values())
        try:
            look_up()
        except KeyError as error:
            told = error
        try:
            look_up()
        except KeyError:  # it has a cause beside this one
            raise OSError("no space") from told

    monkeypatch.setattr(module, "write_tensors", fail)
    run = Run(3, 1)
    run.step(0)
    engine.save_checkpoint(tmp_path / "c", run.model, run.manager, asynchronous=True)
    module._writer.join()
    gc.collect()
    assert known and not any(reference() is not None for reference in known)
    with pytest.raises(OSError, match="no space"):
        engine.wait_checkpoint()


def cannot_stage(path):
    """The host has no room on rank 1."""
    run = Run(3, 1)
    with pytest.MonkeyPatch.context() as patch:
        if engine.rank() == 1:
            patch.setattr(module, "_staged", mock.Mock(side_effect=RuntimeError("host memory")))
        with pytest.raises(RuntimeError, match="host memory") as told:
            engine.save_checkpoint(path, run.model, asynchronous=True)
    return str(told.value)


def test_a_rank_without_room_for_the_copy_keeps_no_other_waiting(two, tmp_path):
    first, _ = two.run(cannot_stage, tmp_path / "c")
    assert first.startswith("rank 1 failed while collecting the state") and names(tmp_path) == []


def test_the_copies_of_each_gpu_are_waited_for(monkeypatch):
    """Not those of the current one alone."""
    asked = []

    def stream(device):
        asked.append(str(device))
        return mock.Mock(record_event=lambda: f"event of {device}")

    monkeypatch.setattr(module, "_staged", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    on = {f"on {d}": SimpleNamespace(is_cuda=d != "cpu", device=torch.device(d)) for d in ("cuda:1", "cpu", "cuda:0")}
    copies, ready = module._stage({"model": on, "optim": {"also": on["on cuda:1"]}})
    assert sorted(asked) == ["cuda:0", "cuda:1"] and sorted(ready) == ["event of cuda:0", "event of cuda:1"]
    assert copies["model"] == on


def test_the_writer_works_on_its_ranks_gpu(monkeypatch, tmp_path):
    """A thread begins on GPU 0, where each rank would take memory. It waits for what is copied from there."""
    chosen = []
    monkeypatch.setattr(module, "_write", lambda job, group: chosen.append("written"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread())))
    copies = mock.Mock(ready=[SimpleNamespace(synchronize=lambda n=n: chosen.append(n)) for n in ("copied", "also")])
    writer = module._start_writer(mock.Mock(path=tmp_path / "c", contents=copies), group=None)
    writer.finish()
    assert chosen == [(3, writer), "copied", "also", "written"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_writer_leaves_the_warnings_of_the_main_thread_alone(tmp_path, monkeypatch):
    """Those that it ignores for a while are shown afterwards, though a save began meanwhile and ended later."""
    begun, go_on = threading.Event(), threading.Event()
    save = torch.distributed.checkpoint.save

    def slowly(*args, **kwargs):
        begun.set(), go_on.wait(10)
        return save(*args, **kwargs)

    monkeypatch.setattr(torch.distributed.checkpoint, "save", slowly)
    ignores_all = ("ignore", None, Warning, None, 0)
    assert ignores_all not in warnings.filters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save_checkpoint(tmp_path / "c", toys.build(), asynchronous=True)
        assert begun.wait(10)
    go_on.set()
    engine.wait_checkpoint()
    assert ignores_all not in warnings.filters


def test_a_writer_that_lost_its_group_says_what_to_call(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_write", mock.Mock(side_effect=ValueError("Group is not registered")))
    writer = module._start_writer(mock.Mock(path=tmp_path / "c", contents=mock.Mock(ready=())), group=mock.Mock())
    with pytest.raises(RuntimeError, match=r"engine.wait_checkpoint\(\) before destroy_process_group\(\)"):
        writer.finish()


@mock.patch.object(background._log, "error")
def failing_writer(path, logged):
    run = Run(3, 1)
    extra = mock.Mock(side_effect=OSError("disk full"))
    engine.save_checkpoint(path, run.model, asynchronous=True, extra=extra if engine.rank() == 0 else None)
    run.step(0)  # training goes on
    with pytest.raises((OSError, RuntimeError), match="disk full"):
        engine.save_checkpoint(path, run.model)
    engine.save_checkpoint(path, run.model, state={"after": 1})
    return logged.call_count


def test_the_writers_error_is_raised_by_the_next_call_on_every_rank(two, tmp_path):
    assert two.run(failing_writer, tmp_path / "c") == [1, 0]  # logged once
    assert engine.load_checkpoint(tmp_path / "c", Run(3, 1).model) == {"after": 1}
    assert names(tmp_path) == ["c"]


def killed_in_a_save(path, asynchronous):
    run = Run(2, 1)
    engine.save_checkpoint(path, run.model, run.manager, {"n": 1}, step=1)
    run.step(0)

    def extra(_):
        os.kill(os.getpid(), signal.SIGKILL)

    engine.save_checkpoint(path, run.model, run.manager, {"n": 2}, step=2, asynchronous=asynchronous, extra=extra)
    time.sleep(30)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_in_a_save_the_older_one_stays_valid(two, tmp_path, asynchronous):
    with pytest.raises(RuntimeError, match="killed by signal 9"):
        two.run(killed_in_a_save, tmp_path, asynchronous)
    run = Run(3, 1)
    assert engine.load_checkpoint(tmp_path, run.model, run.manager, verify=True) == {"n": 1}
    assert [n for n in names(tmp_path) if not n.startswith(".")] == ["last", "step-00000001"]
    engine.save_checkpoint(tmp_path, run.model, run.manager, step=3)
    assert names(tmp_path) == ["last", "step-00000001", "step-00000003"]  # what was left of step 2 is gone


def save_beyond_the_room(path, level, copies, asynchronous):
    run = Run(level, copies)
    engine.save_checkpoint(path, run.model, run.manager, {}, step=1)
    with files_of_at_most(500), pytest.raises((OSError, RuntimeError)) as told:
        engine.save_checkpoint(path, run.model, run.manager, {}, step=2, asynchronous=asynchronous)
        engine.wait_checkpoint()
    return str(told.value)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mesh", [(1, 3, 1), (2, 2, 1)], ids=["one", "two"])
def test_a_disk_without_room_is_an_error_of_one_line(request, tmp_path, mesh, asynchronous):
    """On all ranks; the checkpoint before stays the newest, and nothing half is left."""
    for text in on(request, mesh, save_beyond_the_room, tmp_path, asynchronous):
        assert "File too large" in text and "\n" not in text, text
    assert names(tmp_path) == ["last", "step-00000001"]
    assert engine.latest_checkpoint(tmp_path).name == "step-00000001"
