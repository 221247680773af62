"""When checkpoints are written, and what a full disk costs."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from directory_toys import files_of_at_most
from toydata import command, write_folder
from toyruns import read_summary, run_values, short_run_values, stop_at, went_on_after

import engine
import engine.checkpoint.training
from engine.testing import run as on_ranks
from modelcenter.training import loop
from modelcenter.training.checkpoints import writer
from modelcenter.training.checkpoints.model_selection import ModelSelection
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.stopping import Stopping
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


def test_minutes_alone_are_a_reason_to_save(monkeypatch):
    monkeypatch.setattr(writer, "save_checkpoint", lambda *args, **named: None)
    cfg = ClassificationConfig(output_dir="run", save_every="never", save_minutes=1.0)
    for seconds in (59, 61):
        checkpoints = writer.CheckpointWriter(Path("run"), 1, ModelSelection("loss", None), print)
        checkpoints._started_at = time.monotonic() - seconds
        run: Any = SimpleNamespace(cfg=cfg, stopping=Stopping(None), checkpoints=checkpoints)
        assert loop.Run._save_is_due(run, last=False) == (seconds > 60)
    checkpoints.write(3, None, None, {}, lambda folder: None, wait=False)
    assert not loop.Run._save_is_due(run, last=False)  # they count anew


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_checkpoints_after_so_many_minutes(folder, ranks):
    values = run_values(folder, "run", max_steps=3, save_minutes=1e-9, keep=9) | {"save_every": 99}
    on_ranks(lambda: main(command(values)), 2, timeout=90) if ranks == 2 else main(command(values))
    assert len(list((folder / "run" / "checkpoints").glob("step-*"))) == 3


def test_a_full_disk_costs_the_checkpoint_only(folder, monkeypatch, capsys):
    good, calls = writer.save_checkpoint, []

    def save(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return good(*args, **kwargs)

    monkeypatch.setattr(writer, "save_checkpoint", save)
    main(command(run_values(folder, "run")))
    said = capsys.readouterr().out
    assert "step 4: the checkpoint could not be written: [Errno 28] No space left" in said
    assert re.search(
        r"No space left on device; with what was written of it removed, [\d,.]+ MB are free at .*run\n", said
    )
    assert read_summary(folder)["status"] == "finished"
    assert not (folder / "run" / "checkpoints" / "step-00000004").exists()


def test_a_disk_that_stays_full_is_said_with_the_file(folder, curves, capfd):
    """Files may grow to 6000 bytes: the records fit, checkpoints, curves and the model do not."""
    expected = "saving to .*run/model failed: File too large; nothing was changed"
    with files_of_at_most(6000), pytest.raises(ValueError, match=expected):
        main(command(run_values(folder, "run", max_steps=4, trackers="no")))
    summary = read_summary(folder)
    assert summary["status"] == "failed" and summary["steps"] == 4
    out, err = capfd.readouterr()
    assert "checkpoint could not be written" in out and "curves.png could not be written" in err
    assert "Traceback" not in out + err
    assert not list((folder / "run" / "checkpoints").glob("*")) and not (folder / "run" / "model").exists()


def test_a_checkpoint_that_could_not_be_written_does_not_cost_the_next(folder, monkeypatch, capsys):
    """Not even that of a stop, for which the disk has room again."""
    write, calls = engine.checkpoint.training._write, []

    def fails_once(job, group):
        calls.append(job.step)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        write(job, group)

    monkeypatch.setattr("engine.checkpoint.training._write", fails_once)
    stop_at(monkeypatch, 2, short_run_values(folder, "run"))
    assert calls == [2, 3] and (folder / "run" / "checkpoints" / "step-00000003").is_dir()
    assert "the last checkpoint could not be written: [Errno 28] No space left on device" in capsys.readouterr().out


def test_a_lost_checkpoint_is_not_the_best_though_none_could_be_begun_since(monkeypatch):
    selection, said = ModelSelection("accuracy", None), []
    checkpoints = writer.CheckpointWriter(Path("run"), 1, selection, said.append)
    begins: list = [None, RuntimeError("no memory for the copy")]
    ends: list = [None, OSError(28, "No space left on device"), None]
    monkeypatch.setattr(writer, "save_checkpoint", mock.Mock(side_effect=begins))
    monkeypatch.setattr(writer, "wait_checkpoint", mock.Mock(side_effect=ends))
    selection.judge({"step": 1, "eval_accuracy": 0.9})
    for step in (1, 2):
        checkpoints.write(step, None, None, {}, lambda folder: None, wait=False)
    checkpoints.wait()
    assert selection.best_on_disk == {} and len(said) == 2


def full_from(monkeypatch, step, rank=0):
    """Let a rank find the disk full when it writes its file of a checkpoint of this step or a later one."""
    place = engine.checkpoint.training._rank_file

    def full(path, number):
        if number == rank and int(re.findall(r"step-(\d+)", path.name)[0]) >= step:
            raise OSError(28, "No space left on device")
        return place(path, number)

    monkeypatch.setattr(engine.checkpoint.training, "_rank_file", full)


def test_a_stop_that_cannot_save_is_a_failure(folder, monkeypatch, capfd):
    """Not a stop after which the same command is to be run again, for ever: schedulers would."""
    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        full_from(patch, 3)
        stop_at(patch, 2, short_run_values(folder, "run"))
    said = str(caught.value)
    assert said.startswith("stopped by SIGTERM, but step 3: the checkpoint could not be written: [Errno 28] No space")
    assert said.endswith("/run; the same command continues after step 2")
    summary = read_summary(folder)
    assert (summary["status"], summary["reason"]) == ("failed", f"OSError: {said}")
    main(command(short_run_values(folder, "run")))
    assert went_on_after(capfd) == 2


def test_all_ranks_fail_where_one_cannot_save_at_a_stop(folder, monkeypatch, capfd):
    full_from(monkeypatch, 1, rank=1)
    values = short_run_values(folder, "run", max_time="0.000001s")

    def on_a_rank():
        with pytest.raises(OSError, match="max_time passed, but step 1: .*; the same command starts over") as caught:
            main(command(values))
        return "rank 1 failed while" in str(caught.value)

    assert on_ranks(on_a_rank, 2, timeout=60) == [True, False]
    assert read_summary(folder)["status"] == "failed"
