"""A run that is killed, stopped or broken goes on to the same end."""

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from toydata import SIZES, command, flags, make_rows, write_folder, write_jsonl
from toyruns import assert_same_end, curve, die_at, in_a_process, weights, went_on_after

import engine
import modelcenter
from engine.testing import run as on_ranks
from modelcenter.command_line.errors import Stopped
from modelcenter.training import loop, stopping
from modelcenter.training.checkpoints import writer
from modelcenter.training.checkpoints.model_selection import ModelSelection
from modelcenter.training.checkpoints.resume import Continuation
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.config.common import seconds_of
from modelcenter.training.output.record import Record
from modelcenter.training.setup import automatic_batch_size
from modelcenter.training.setup.automatic_batch_size import largest_batch_sizes, rows_that_fit
from modelcenter.training.setup.batch_sizes import continued_batch_sizes
from modelcenter.training.setup.memory import state_bytes
from modelcenter.training.setup.optimizer import make_optimizer
from modelcenter.training.setup.resolve import resolve_automatic_batch_size, resolve_eval_batch_size
from modelcenter.training.stopping import Stopping
from scripts.finetune_classification import main

DROPPED = {"model_config": SIZES | {"dropout": 0.3, "attention_dropout": 0.3}}


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


def values_of(folder, name, **changes):
    return flags(folder, **{"output_dir": str(folder / name), "epochs": 3, "save_every": 2} | changes)


@pytest.mark.parametrize("step", [5, *(pytest.param(step, marks=pytest.mark.full) for step in (1, 11))])
def test_killed_runs_go_on_bit_for_bit(folder, monkeypatch, capfd, step):
    """12 steps of 3 epochs, with dropout; checkpoints at every second one."""
    assert in_a_process(main, values_of(folder, "whole", **DROPPED)) == 0
    assert "going on" not in capfd.readouterr().out
    with monkeypatch.context() as patch:
        die_at(patch, step)
        assert in_a_process(main, values_of(folder, "run", **DROPPED)) == -signal.SIGKILL
    assert not (folder / "run" / "model").exists()
    # The newest checkpoint was perhaps being written; the one before it was whole by then.
    whole = [int(p.name.removeprefix("step-")) for p in (folder / "run" / "checkpoints").glob("step-*")]
    newest = max(whole, default=0)
    assert newest >= step - 3
    assert in_a_process(main, values_of(folder, "run", **DROPPED)) == 0
    assert went_on_after(capfd) == newest
    assert_same_end(folder, "run")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 12
    assert summary["tokens"] == json.loads((folder / "whole" / "summary.json").read_text())["tokens"]


def test_killed_during_a_save(folder, monkeypatch, capfd):
    from engine.checkpoint import training

    assert in_a_process(main, values_of(folder, "whole", **DROPPED)) == 0
    write = training.write_tensors

    def killed(path, *args):
        write(path, *args)
        if ".step-00000006" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(training, "write_tensors", killed)
        assert in_a_process(main, values_of(folder, "run", **DROPPED)) == -signal.SIGKILL
    names = {p.name for p in (folder / "run" / "checkpoints").iterdir()}
    assert "step-00000006" not in names and any(name.startswith(".step-00000006.partial") for name in names)
    assert in_a_process(main, values_of(folder, "run", **DROPPED)) == 0
    assert went_on_after(capfd) == 4
    assert_same_end(folder, "run")
    assert not [p for p in (folder / "run" / "checkpoints").iterdir() if "partial" in p.name]


@pytest.mark.full
def test_killed_before_a_checkpoint_is_named(folder, monkeypatch, capfd):
    """The newest counts, though ``last`` is still the one before it."""
    from engine.checkpoint import training

    assert in_a_process(main, values_of(folder, "whole", **DROPPED)) == 0
    name = training._name

    def killed(link, target):
        if target.name == "step-00000006":
            os.kill(os.getpid(), signal.SIGKILL)
        name(link, target)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_name", killed)
        assert in_a_process(main, values_of(folder, "run", **DROPPED)) == -signal.SIGKILL
    assert (folder / "run" / "checkpoints" / "last").resolve().name == "step-00000004"
    assert in_a_process(main, values_of(folder, "run", **DROPPED)) == 0
    assert went_on_after(capfd) == 6
    assert_same_end(folder, "run")


def test_a_broken_checkpoint_is_passed_over(folder, monkeypatch, capfd):
    main(command(values_of(folder, "whole", **DROPPED)))
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(values_of(folder, "run", **DROPPED)))
    newest = folder / "run" / "checkpoints" / "step-00000006"
    victim = next(p for p in (newest / "model").iterdir() if p.stat().st_size > 1000)
    victim.write_bytes(victim.read_bytes()[:-7])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        main(command(values_of(folder, "run", **DROPPED)))
    assert any("passed over" in str(w.message) and victim.name in str(w.message) for w in said)
    assert went_on_after(capfd) == 4
    assert_same_end(folder, "run")


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.full), 3])
def test_two_ranks_that_are_killed_go_on_bit_for_bit(folder, monkeypatch, capfd, zero):
    cut = {"zero": zero, "batch_size": 2, "gradient_accumulation_steps": 2, **DROPPED}
    on_ranks(lambda: main(command(values_of(folder, "whole", **cut))), 2, timeout=90)
    with monkeypatch.context() as patch:
        die_at(patch, 7)
        with pytest.raises(RuntimeError, match="died: killed by signal 9"):
            on_ranks(lambda: main(command(values_of(folder, "run", **cut))), 2, timeout=90)
    on_ranks(lambda: main(command(values_of(folder, "run", **cut))), 2, timeout=90)
    assert went_on_after(capfd) in (4, 6)  # step 6 may have been half written
    assert_same_end(folder, "run")


def test_another_number_of_ranks_keeps_the_global_batch(folder, monkeypatch, capfd):
    """Losses within rounding, from 1 rank to 2 and on to 1."""
    main(command(values_of(folder, "whole")))
    for step, ranks, before in ((3, 1, 0), (7, 2, 4), (None, 1, 8)):
        with monkeypatch.context() as patch:
            if step is not None:
                die_at(patch, step, signal.SIGTERM)
            if ranks == 1:
                main(command(values_of(folder, "run")))
            else:
                on_ranks(lambda: main(command(values_of(folder, "run"))), 2, timeout=90)
        assert went_on_after(capfd) == before
    ours, whole = curve(folder, "run"), curve(folder, "whole")
    assert len(ours) == len(whole)
    for row, expected in zip(ours, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.full)])
def test_a_signal_stops_in_order_and_the_command_goes_on(folder, monkeypatch, capsys, number):
    main(command(values_of(folder, "whole", **DROPPED)))
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        die_at(patch, 4, number)
        assert in_a_process(main, values_of(folder, "run", **DROPPED)) == 0
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"], summary["steps"]) == ("stopped", f"stopped by {number.name}", 5)
    assert (folder / "run" / "checkpoints" / "last").resolve().name == "step-00000005"
    assert not (folder / "run" / "model").exists()
    capsys.readouterr()
    main(command(values_of(folder, "run", **DROPPED)))
    assert "going on after step 5" in capsys.readouterr().out
    assert signal.getsignal(number) is before
    rows = [row for row in curve(folder, "run")]
    assert rows == curve(folder, "whole")


@pytest.mark.full
def test_ctrl_c_saves_and_is_an_error(folder, monkeypatch):
    die_at(monkeypatch, 4, signal.SIGINT)
    with pytest.raises(Stopped, match="stopped by SIGINT"):
        main(command(values_of(folder, "run")))
    assert (folder / "run" / "checkpoints" / "step-00000005").is_dir()
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("stopped", 5)


def test_a_second_ctrl_c_ends_the_run_at_once(folder, monkeypatch):
    take, reached = loop.Run.train_step, []

    def train_step(self, batch):
        if batch.step == 3:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):  # a launcher passes on what a terminal sent
                os.kill(os.getpid(), number)
            time.sleep(0.15)
            reached.append("after one Ctrl-C")
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
            reached.append("after two")
        return take(self, batch)

    monkeypatch.setattr(loop.Run, "train_step", train_step)
    monkeypatch.setattr(stopping, "_SECOND_INTERRUPT", 0.1)
    with pytest.raises(Stopped, match="SIGINT"):
        main(command(values_of(folder, "run")))
    assert reached == ["after one Ctrl-C"]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("stopped", 3)


def _long_step(path):
    """A step that does not end, in a process that is told to stop."""

    def leave(reason):
        path.write_text(reason)
        raise OSError(errno.ENOSPC, "No space left on device")

    with Stopping(None, leave, grace=0.3):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(60)


def test_a_step_that_takes_too_long_is_left(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=_long_step, args=(tmp_path / "reason",))
    began = time.monotonic()
    child.start()
    child.join(30)
    assert child.exitcode == 0 and time.monotonic() - began < 25  # though there is no room for the summary
    assert "stopped by SIGTERM in a step of more than 0.3 s" in (tmp_path / "reason").read_text()


def test_saving_the_model_is_not_left(folder, monkeypatch):
    """Whatever time it takes: all steps are done."""
    save, watches = loop.save_final_model, []

    def signalled(run, target):
        os.kill(os.getpid(), signal.SIGTERM)
        watches.extend(thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        save(run, target)

    monkeypatch.setattr(loop, "save_final_model", signalled)
    main(command(values_of(folder, "run", max_steps=1, save_every="never")))
    assert not watches and (folder / "run" / "model").is_dir()
    assert json.loads((folder / "run" / "summary.json").read_text())["status"] == "finished"


def test_a_handler_that_was_not_set_from_python_is_no_error_at_the_end(monkeypatch):
    given = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: given.append(handler))  # None: not from Python
    with Stopping(None):
        pass
    assert given[3:] == [signal.SIG_DFL] * 3


def test_the_group_for_asking_is_given_back(monkeypatch):
    groups = []
    monkeypatch.setattr(engine, "world_size", lambda: 2)
    monkeypatch.setattr(engine, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: groups.append("made") or "group")
    monkeypatch.setattr(torch.distributed, "destroy_process_group", groups.append)
    with Stopping(None):
        pass
    assert groups == ["made", "group"]


def test_minutes_alone_are_a_reason_to_save():
    cfg = ClassificationConfig(output_dir="run", save_every="never", save_minutes=1.0)
    for seconds in (59, 61):
        checkpoints = SimpleNamespace(minutes_since_last=seconds / 60)
        run: Any = SimpleNamespace(cfg=cfg, stopping=Stopping(None), checkpoints=checkpoints)
        assert loop.Run._save_is_due(run, last=False) == (seconds > 60)


def test_max_time_counts_from_the_start_of_the_command(folder, monkeypatch):
    """Data are tokenised and models loaded in the hours that a job has."""
    for seconds in (9, 11):
        assert Stopping(10, began=time.monotonic() - seconds).should_stop() == (seconds > 10)
    before, given = time.monotonic(), []
    monkeypatch.setattr(loop, "train", lambda *args: given.append(args[-1]))
    main(command(values_of(folder, "run", max_time="8h")))
    assert before <= given[0] < time.monotonic()


def test_max_time(folder, capsys):
    main(command(values_of(folder, "run", max_time="0.000001s")))
    assert capsys.readouterr().out.splitlines()[-1] == "max_time passed, at step 1/12; the same command goes on"
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"], summary["steps"]) == ("stopped", "max_time passed", 1)
    main(command(values_of(folder, "run")))
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 12
    assert [seconds_of(t) for t in ("90s", "1.5m", "8h", "2d", "01:02:03", "1-00:00:10")] == [
        90, 90, 28800, 172800, 3723, 86410]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_checkpoints_after_so_many_minutes(folder, ranks):
    values = values_of(folder, "run", max_steps=3, save_minutes=1e-9, keep=9) | {"save_every": 99}
    on_ranks(lambda: main(command(values)), 2, timeout=90) if ranks == 2 else main(command(values))
    assert len(list((folder / "run" / "checkpoints").glob("step-*"))) == 3


@pytest.mark.full
def test_resume_never_and_by_path(folder, monkeypatch):
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(values_of(folder, "run")))
    main(command(values_of(folder, "other", resume=str(folder / "run"), lr=1e-3)))
    rows = curve(folder, "other")
    assert rows[0]["step"] == 7 and rows[-1]["step"] == 12
    step = folder / "run" / "checkpoints" / "step-00000004"
    main(command(values_of(folder, "third", resume=str(step))))
    assert curve(folder, "third")[0]["step"] == 5
    main(command(values_of(folder, "run", resume="never")))
    assert curve(folder, "run")[0]["step"] == 1
    with pytest.raises(ValueError, match="resume: .*nowhere holds no whole checkpoint"):
        main(command(values_of(folder, "fourth", resume=str(folder / "nowhere"))))


def test_a_checkpoint_of_another_run_is_not_continued(folder, monkeypatch):
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(values_of(folder, "run")))
    write_jsonl(folder / "x.jsonl", make_rows(20, seed=3))
    for changes, says in (
        ({"lr": 0.5}, r"lr: got 0\.5, but .*step-00000006 is of a run with 0\.01\. Give the same; or --resume never"),
        ({"max_length": 16}, "max_length: got 16, but .* is of a run with 32"),
        ({"global_batch_size": 16}, "global_batch_size: got 16, but"),
        (
            {"train_data": str(folder / "x.jsonl")},
            r"train_data: .*\(20 rows now, 27 rows then; .*train.jsonl is gone; .*x.jsonl is new\). Give the same",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            main(command(values_of(folder, "run", **changes)))
    train = folder / "data" / "train.jsonl"
    rows = train.read_text()
    write_jsonl(train, make_rows(27, seed=3))
    with pytest.raises(ValueError, match=r"\(27 rows now, 27 rows then; .*train.jsonl has changed\). Give the same"):
        main(command(values_of(folder, "run")))
    train.write_text(rows)
    main(command(values_of(folder, "run", batch_size=4)))  # nothing was lost


def _compare(other_rows):
    engine.init_distributed()
    places = [{"model": f"/node{n}/bert", "tokenizer": f"/node{n}/words"} for n in (0, engine.rank())]
    saved, now = (ClassificationConfig(**own, lr=0.1) for own in places)
    checkpoint = Continuation(Path("step-1"), 1, saved.arithmetic(), {"rows": 3}, forced=False)
    checkpoint.check(now, {"rows": 3})
    try:
        checkpoint.check(now, {"rows": 4 if engine.rank() == 1 and other_rows else 3})
    except ValueError as error:
        return str(error)


def test_nodes_may_go_on_with_a_model_at_places_of_their_own():
    """What is another run or other data for one rank is so for all: none waits for one that is gone."""
    assert on_ranks(_compare, 2, False) == [None, None]
    assert all("train_data: the rows are not those that step-1" in said for said in on_ranks(_compare, 2, True))


def test_a_model_is_the_same_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = ClassificationConfig(model="bert").arithmetic()
    now = ClassificationConfig(model=str(tmp_path / "bert"))
    Continuation(Path("step-1"), 1, before, {"rows": 3}, forced=False).check(now, {"rows": 3})


@pytest.mark.parametrize(
    ("given", "flags", "says"),
    [
        ({"batch_size": 64}, {"global_batch_size": 8}, "keeps its global_batch_size of 8, though the flags make 64;"),
        (
            {"batch_tokens": 40, "gradient_accumulation_steps": 3},
            {"global_batch_tokens": 40, "batch_tokens": 40},
            "keeps its global_batch_tokens of 40, though the flags make 120; for that give --global_batch_tokens too",
        ),
    ],
)
def test_a_step_that_keeps_its_size_against_the_flags_is_said(given, flags, says, caplog):
    for forced in (False, True):
        cfg = ClassificationConfig(**given)
        assert says not in caplog.text
        sizes = continued_batch_sizes(cfg, Continuation(Path("step-1"), 1, flags, None, forced), 1)
        assert sizes["gradient_accumulation_steps"] == 1
    assert says in caplog.text


def test_free_flags_may_change(folder, monkeypatch, capfd):
    main(command(values_of(folder, "whole")))
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(values_of(folder, "run")))
    moved = folder / "moved"
    shutil.copytree(folder / "data", moved)
    more = {"batch_size": 4, "train_data": str(moved), "keep": 5, "recompute": "full", "eval_batch_size": 3}
    main(command(values_of(folder, "run", **more)))
    assert went_on_after(capfd) == 6
    for row, expected in zip(curve(folder, "run"), curve(folder, "whole"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len(list((folder / "run" / "checkpoints").glob("step-*"))) == 5


def test_best_model_and_early_stopping(folder, monkeypatch):
    scores = iter([0.5, 0.9, 0.9, 0.4, 0.3, 0.2])
    judge = loop.Run.evaluate

    def evaluate(self):
        row = judge(self) | {"eval_accuracy": next(scores)}
        self.record.rows[-1].update(row)
        return row

    monkeypatch.setattr(loop.Run, "evaluate", evaluate)
    watched = {"eval_every": 2, "best_metric": "accuracy", "early_stopping": 3, "save_every": "never"}
    main(command(values_of(folder, "run") | watched))
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 10 and summary["status"] == "finished" and summary["best"]["step"] == 4
    assert (folder / "run" / "checkpoints" / "best").resolve().name == "step-00000004"
    monkeypatch.undo()
    main(command(values_of(folder, "four") | {"max_steps": 4, "lr_scheduler": "constant"}))
    main(command(values_of(folder, "ten") | {"lr_scheduler": "constant", "eval_every": 4, "best_metric": "loss"}))
    best = json.loads((folder / "ten" / "summary.json").read_text())["best"]
    assert best["metric"] == "eval_loss"
    losses = {row["step"]: row["eval_loss"] for row in curve(folder, "ten") if "eval_loss" in row}
    assert best["step"] == min(losses, key=losses.get)
    with pytest.raises(ValueError, match="best_metric: got 'f1_x', the evaluation gives loss, accuracy, f1, mcc"):
        monkeypatch.setattr(loop, "check_best_metric", lambda *_: None)
        main(command(values_of(folder, "wrong", best_metric="f1_x")))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"best_metric": "rouge"}, "best_metric: got 'rouge', expected one of loss, accuracy, f1, mcc$"),
        ({"best_metric": "acc"}, "best_metric: got 'acc', .* Did you mean 'accuracy'"),
        ({"best_metric": "acuracy"}, "best_metric: got 'acuracy', expected one of loss, .* Did you mean 'accuracy'"),
        ({"best_metric": "loss", "eval_data": None}, "best_metric: there are no rows to evaluate on; give eval_data"),
        ({"early_stopping": 2, "eval_data": None}, "early_stopping: there are no rows to evaluate on"),
    ],
)
def test_what_no_evaluation_gives_is_said_before_the_first_step(folder, changes, says):
    only = {"train_data": [str(folder / "data" / "train.jsonl")]} if "eval_data" in changes else {}
    with pytest.raises(ValueError, match=says):
        main(command(values_of(folder, "run", **only, **changes)))
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.full
def test_the_best_checkpoint_becomes_the_model(folder, monkeypatch):
    judge = ModelSelection.judge
    monkeypatch.setattr(ModelSelection, "judge", lambda self, row: judge(self, row | {"eval_accuracy": -row["step"]}))
    best = {"eval_every": 4, "best_metric": "accuracy", "warmup": 0, "lr_scheduler": "constant"}
    main(command(values_of(folder, "run") | best))
    monkeypatch.undo()
    main(command(values_of(folder, "four") | best | {"max_steps": 4}))
    for key, tensor in weights(folder, "four").items():
        assert torch.equal(tensor, weights(folder, "run")[key]), key


def test_a_full_disk_costs_the_checkpoint_only(folder, monkeypatch, capsys):
    good, calls = writer.save_checkpoint, []

    def save(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return good(*args, **kwargs)

    monkeypatch.setattr(writer, "save_checkpoint", save)
    main(command(values_of(folder, "run")))
    said = capsys.readouterr().out
    assert "step 4: the checkpoint could not be written: [Errno 28] No space left" in said
    assert re.search(r"No space left on device; [\d,.]+ MB are free at .*run\n", said)
    assert json.loads((folder / "run" / "summary.json").read_text())["status"] == "finished"
    assert not (folder / "run" / "checkpoints" / "step-00000004").exists()


def test_a_disk_that_stays_full_is_said_with_the_file(folder, curves, capfd):
    """Files may grow to 6000 bytes: the records fit, checkpoints, curves and the model do not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        with pytest.raises(ValueError, match="saving to .*run/model failed: File too large; nothing was changed"):
            main(command(values_of(folder, "run", max_steps=4, trackers="no")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["steps"] == 4
    out, err = capfd.readouterr()
    assert "checkpoint could not be written" in out and "curves.png could not be written" in err
    assert "Traceback" not in out + err
    assert not list((folder / "run" / "checkpoints").glob("*")) and not (folder / "run" / "model").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no file that is always full")
def test_a_full_disk_costs_rows_and_not_the_run(tmp_path, capsys):
    """Nor what is remembered of them."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    record = Record(tmp_path, 3, writer=True)
    for step in (1, 2):
        record.log({"step": step})
        record.log_sample({"step": step})
    record.close({"steps": 2})
    assert record.rows == [{"step": 1}, {"step": 2}] and json.loads((tmp_path / "summary.json").read_text())["steps"]
    said = capsys.readouterr().out
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert said.count(f"{name} cannot be written, the run goes on without its rows: No space left on device; ") == 1


def test_a_summary_that_finds_no_room_is_an_error_with_its_name(tmp_path):
    record = Record(tmp_path, 3, writer=True)
    (tmp_path / ".summary.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/summary.json'"):
        record.close({})


def test_curves_that_cannot_be_drawn_cost_nothing_else(tmp_path, monkeypatch, capsys):
    def plot(rows, path):
        raise KeyError("lr")

    monkeypatch.setattr("modelcenter.training.output.record.plot", plot)
    ended = []
    record = Record(tmp_path, 3, writer=True)
    monkeypatch.setattr(record._trackers, "close", lambda: ended.append(True))
    record.close({"steps": 2})
    assert ended and (tmp_path / "summary.json").is_file()
    assert "curves.png could not be written: KeyError: 'lr'" in capsys.readouterr().err


@pytest.mark.full
def test_a_summary_that_cannot_be_written_ends_all_ranks_alike(folder, monkeypatch):
    def close(self, summary):
        if self.path is not None:
            raise OSError(28, "No space left on device", "summary.json")

    def run():
        with pytest.raises(OSError, match="No space left on device") as error:
            main(command(values_of(folder, "run", max_steps=1)))
        return str(error.value)

    monkeypatch.setattr(Record, "close", close)
    first, second = on_ranks(run, 2)
    assert "summary.json" in first and second.startswith("rank 0 failed while writing summary.json: ")


def test_skipped_steps_name_their_rows(folder, monkeypatch):
    good, calls = loop.accumulate, []

    def accumulate(model, *args, **kwargs):
        loss = good(model, *args, **kwargs)
        calls.append(1)
        if len(calls) in (3, 4):
            next(model.parameters()).grad.fill_(float("inf"))
        return loss

    monkeypatch.setattr(loop, "accumulate", accumulate)
    main(command(values_of(folder, "run", log_every=5) | {"log_every": 5}))
    with open(folder / "run" / "skipped.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert [row["step"] for row in rows] == [3, 4] and all(row["rows"].count("train.jsonl, line") >= 3 for row in rows)


@pytest.mark.full
def test_batches_by_tokens_go_on_too(folder, monkeypatch, capfd):
    """On 1 rank and on 2; every row once an epoch, no microbatch above its tokens."""
    by_tokens = {"batch_tokens": 40, "gradient_accumulation_steps": 2}
    main(command(values_of(folder, "whole", **by_tokens)))
    whole = curve(folder, "whole")
    with monkeypatch.context() as patch:
        die_at(patch, 3, signal.SIGTERM)
        main(command(values_of(folder, "run", **by_tokens)))
    del by_tokens["gradient_accumulation_steps"]
    on_ranks(lambda: main(command(values_of(folder, "run", **by_tokens))), 2, timeout=90)
    assert went_on_after(capfd) == 4
    for row, expected in zip(curve(folder, "run"), whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)
    steps = [row for row in whole if "loss" in row]
    sizes = [b["tokens"] - a["tokens"] for a, b in zip(steps, steps[1:], strict=False)]
    assert max(sizes) <= 80 and steps[-1]["tokens"] % 3 == 0
    with pytest.raises(ValueError, match="batch_tokens: row .* a microbatch takes 5; raise batch_tokens"):
        main(command(values_of(folder, "small", batch_tokens=5)))


@pytest.mark.parametrize(
    ("ranks", "longest", "given", "found"),
    [
        (1, 8, {}, (32, 1, 32)),
        (3, 8, {}, (10, 1, 30)),
        (1, 2048, {}, (4, 8, 32)),
        (1, 8, {"gradient_accumulation_steps": 3}, (10, 3, 30)),
        (2, 2048, {"gradient_accumulation_steps": 3}, (4, 3, 24)),
        (1, 8, {"gradient_accumulation_steps": 50}, (1, 50, 50)),
        (1, 2048, {"global_batch_size": 30}, (3, 10, 30)),
        (1, 8, {"global_batch_size": 30, "gradient_accumulation_steps": 5}, (6, 5, 30)),
    ],
)
def test_automatic_batches_fit_the_other_flags(monkeypatch, ranks, longest, given, found):
    """Rows of a microbatch on a CPU, whose batches have 8,192 tokens at most; microbatches; rows of a step."""
    monkeypatch.setattr(engine, "data_size", lambda: ranks)
    cfg = ClassificationConfig(batch_size=-1, **given)
    resolve_automatic_batch_size(cfg, None, None, SimpleNamespace(lengths=np.array([3, longest])))
    assert (cfg.batch_size, cfg.gradient_accumulation_steps, cfg.global_batch_size) == found


def test_automatic_batches_that_no_ranks_can_share():
    cfg = ClassificationConfig(batch_size=-1, global_batch_size=30, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="global_batch_size: got 30, expected a multiple of 1 ranks times 4 microb"):
        largest_batch_sizes(cfg, None, None, SimpleNamespace(lengths=np.array([8])))


@pytest.mark.full
def test_automatic_batch_size(folder):
    main(command(values_of(folder, "run") | {"batch_size": "auto", "global_batch_size": 12}))
    whole = curve(folder, "run")
    main(command(values_of(folder, "by-hand") | {"batch_size": 4, "global_batch_size": 12}))
    for row, expected in zip(whole, curve(folder, "by-hand"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("free", "trained", "more", "rows"),
    [
        (20_000, True, {}, 1 + (17_000 - 1200 - 800 - 8 * 1000) // 100),
        (20_000, False, {}, 1 + (17_000 - 1200 - 800) // 100),  # a frozen base has no moments
        (20_000, True, {"offload": "optimizer"}, 1 + (17_000 - 1200 - 800) // 100),
        (20_000, True, {"optimizer": "lion"}, 1 + (17_000 - 1200 - 800 - 4 * 1000) // 100),
        (9_000, True, {}, 1),  # at least one is tried, also where others hold the memory
    ],
)
def test_automatic_batch_size_on_a_gpu(monkeypatch, free, trained, more, rows):
    """Parameters of 1,200 bytes, a peak of gradients of 800 whatever the rows, and 100 bytes a row before backward."""
    held: dict[str, Any] = {"now": 0, "microbatches": 0}

    def accumulate(model, microbatches, loss_fn, backward):
        held["microbatches"] = len(microbatches)
        for batch in microbatches:
            held["now"] = 1200 + 100 * len(batch)
            backward(SimpleNamespace(backward=lambda: None))

    answers: dict[str, Any] = {
        "memory_allocated": lambda: held["now"], "max_memory_allocated": lambda: 2000, "memory_reserved": lambda: 0,
        "mem_get_info": lambda: (free, 10**9), "reset_peak_memory_stats": lambda: None, "current_device": lambda: 0,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr(automatic_batch_size, "accumulate", accumulate)
    monkeypatch.setattr(engine, "device", lambda: torch.device("cuda"))
    cfg = ClassificationConfig(batch_size=-1, global_batch_size=10**6, gradient_accumulation_steps=1, **more)
    found = []
    model = torch.nn.Linear(1000, 1, bias=False).requires_grad_(trained)
    examples = SimpleNamespace(lengths=np.array([3, 8]), batch=lambda rows: found.append(rows.tolist()) or rows)
    monkeypatch.setattr(automatic_batch_size, "rows_that_fit", lambda *sizes: found.append(rows_that_fit(*sizes)) or 1)
    largest_batch_sizes(cfg, SimpleNamespace(loss_fn=None), model, examples)
    assert found == [[1], [1, 1], rows] and held["microbatches"] == 2

    def too_much(model, microbatches, loss_fn, backward):
        if len(microbatches[0]) > held["fit"]:
            raise torch.OutOfMemoryError
        accumulate(model, microbatches, loss_fn, backward)

    monkeypatch.setattr(automatic_batch_size, "accumulate", too_much)
    held["fit"] = 1
    found.clear()
    largest_batch_sizes(cfg, SimpleNamespace(loss_fn=None), model, examples)
    assert found == [[1], [1, 1], 1]
    held["fit"] = 0
    with pytest.raises(ValueError, match="1 row of 8 tokens does not fit the memory of rank 0's GPU; lower --max_len"):
        largest_batch_sizes(cfg, SimpleNamespace(loss_fn=None), model, examples)
    held["fit"] = 1
    monkeypatch.setattr(engine, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="2 rows of 8 tokens does not fit .*; give --batch_size 1"):
        largest_batch_sizes(cfg, SimpleNamespace(loss_fn=None), model, examples)


@pytest.mark.parametrize(
    ("name", "task"),
    [("tiny/gpt2", "causal-lm"), ("tiny/t5", "seq2seq-lm"), ("tiny/bert", "pretraining"), ("tiny/cpmant", "causal-lm")]
    + [("tiny/encoder-decoder", "seq2seq-lm")],
)
def test_muon_is_for_hidden_layers(name, task):
    """Not for tables of words, positions, token types and distances, nor for heads."""
    model = modelcenter.from_config(name, task, policy=False)
    names = {id(p): name for name, p in model.named_parameters()}
    manager, _ = make_optimizer(ClassificationConfig(optimizer="muon"), model, 10)
    muon, others = ({names[id(p)] for g in o.param_groups for p in g["params"]} for o in manager.optimizers)
    assert muon and all(re.search(r"\b(attn|cross|mlp|pooler)\.", n) for n in muon), muon
    assert not any(re.search(r"\.(q|k|v|out|up|down|gate)\.weight", n) for n in others)


def test_evaluation_batches_where_tokens_fill_those_of_training():
    cfg = ClassificationConfig(batch_tokens=100)
    resolve_eval_batch_size(cfg, SimpleNamespace(lengths=np.array([3, 40])), None, object())
    assert cfg.eval_batch_size == 5
    cfg = ClassificationConfig(batch_tokens=100, eval_batch_size=3)
    resolve_eval_batch_size(cfg, SimpleNamespace(lengths=np.array([300])))
    assert cfg.eval_batch_size == 3


@pytest.mark.parametrize(
    ("changes", "device", "host"),
    [
        ({}, 16 * 600, 0),
        ({"optimizer": "lion"}, 12 * 600, 0),
        ({"offload": "optimizer"}, 8 * 600, 12 * 600),
        ({"lora_rank": 2}, 4 * 600 + 16 * 2 * (20 + 30), 0),
    ],
)
def test_memory_of_the_state_is_of_what_is_trained(changes, device, host):
    model = torch.nn.Sequential(torch.nn.Linear(20, 30, bias=False))
    if "lora_rank" in changes:
        model.requires_grad_(False)
        model.append(torch.nn.Linear(20, 2, bias=False))
        model.append(torch.nn.Linear(2, 30, bias=False))
    assert state_bytes(ClassificationConfig(**changes), model) == (device, host, 0)


def sharded_bytes(level, precision):
    engine.init_distributed(zero_level=level)
    model = engine.shard(torch.nn.Linear(20, 30, bias=False), policy=engine.Policy(precision=precision))
    return state_bytes(ClassificationConfig(), model)


@pytest.mark.full
def test_memory_of_shards_and_of_what_a_step_gathers():
    wanted = {
        (0, "fp32"): (16 * 600, 0, 0),
        (0, "bf16"): (16 * 600, 0, 2 * 600),
        (1, "fp32"): (8 * 600, 0, 8 * 600),
        (2, "bf16"): (8 * 600, 0, 2 * 600),
        (3, "bf16"): (8 * 600, 0, 0),
    }
    with engine.testing.Pool(2) as two:
        for case, numbers in wanted.items():
            assert two.run(sharded_bytes, *case) == [numbers] * 2, case


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["lion", "muon", "adamw8bit", "adafactor"])
def test_other_optimizers_go_on_too(folder, monkeypatch, capfd, optimizer):
    main(command(values_of(folder, "whole", optimizer=optimizer)))
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(values_of(folder, "run", optimizer=optimizer)))
    main(command(values_of(folder, "run", optimizer=optimizer)))
    assert went_on_after(capfd) == 6
    assert_same_end(folder, "run")


@pytest.mark.parametrize(
    "precision", ["bf16-params", *(pytest.param(p, marks=pytest.mark.full) for p in ("bf16", "fp16", "bf16-sr"))]
)
def test_precisions_train(folder, precision):
    """The curve is that of fp32 but for the rounding; what the parameters are kept in is what is exported."""
    main(command(values_of(folder, "whole", max_steps=6)))
    offload = "optimizer" if precision == "bf16-params" else "none"
    main(command(values_of(folder, "run", precision=precision, offload=offload, max_steps=6)))
    for row, expected in zip(curve(folder, "run"), curve(folder, "whole"), strict=True):
        if "loss" in row:
            assert row["loss"] == pytest.approx(expected["loss"], abs=2e-2)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02, abs=2e-3)  # of some 0.2
    kept = {tensor.dtype for tensor in weights(folder, "run").values()}
    assert kept == {torch.bfloat16 if precision.startswith("bf16-") else torch.float32}
    assert curve(folder, "run") != curve(folder, "whole")
