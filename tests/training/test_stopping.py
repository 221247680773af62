"""A run stops in order on signals and at the end of its time, and the same command continues."""

import errno
import functools
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from toydata import SIZES, STILL, command, write_folder
from toyruns import (
    DROPPED,
    assert_same_end,
    best_of,
    curve,
    die_at,
    in_a_process,
    read_summary,
    run_values,
    short_run_values,
    stop_at,
    went_on_after,
)

import engine
from engine.testing import run as on_ranks
from modelcenter.command_line.errors import Stopped
from modelcenter.training import loop, stopping
from modelcenter.training.config.common import seconds_of
from modelcenter.training.stopping import Stopping
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27, dev=4)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.full)])
def test_a_signal_stops_in_order_and_the_command_goes_on(folder, monkeypatch, capsys, number):
    main(command(run_values(folder, "whole", **DROPPED)))
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        die_at(patch, 4, number)
        assert in_a_process(main, run_values(folder, "run", **DROPPED)) == 0
    summary = read_summary(folder)
    assert (summary["status"], summary["reason"], summary["steps"]) == ("stopped", f"stopped by {number.name}", 5)
    assert (folder / "run" / "checkpoints" / "last").resolve().name == "step-00000005"
    assert not (folder / "run" / "model").exists()
    capsys.readouterr()
    main(command(run_values(folder, "run", **DROPPED)))
    assert "continuing after step 5" in capsys.readouterr().out
    assert signal.getsignal(number) is before
    rows = [row for row in curve(folder, "run")]
    assert rows == curve(folder, "whole")


@pytest.mark.full
def test_ctrl_c_saves_and_is_an_error(folder, monkeypatch):
    die_at(monkeypatch, 4, signal.SIGINT)
    with pytest.raises(Stopped, match="stopped by SIGINT"):
        main(command(run_values(folder, "run")))
    assert (folder / "run" / "checkpoints" / "step-00000005").is_dir()
    summary = read_summary(folder)
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
        main(command(run_values(folder, "run")))
    assert reached == ["after one Ctrl-C"]
    summary = read_summary(folder)
    assert (summary["status"], summary["steps"]) == ("stopped", 3)


def test_an_ignored_ctrl_c_stays_ignored():
    """A shell starts a script's background jobs so; Ctrl-C at the terminal reaches them too."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping(None) as told:
            os.kill(os.getpid(), signal.SIGINT)
            assert not told.should_stop()
    finally:
        signal.signal(signal.SIGINT, usual)


def _long_step(path, number):
    """A step that does not end, in a process that is told to stop."""

    def leave(reason):
        path.write_text(reason)
        raise OSError(errno.ENOSPC, "No space left on device")

    with Stopping(None, leave, grace=0.3):
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        time.sleep(60)


@pytest.mark.parametrize(("number", "exitcode"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_step_that_takes_too_long_is_left(tmp_path, number, exitcode):
    child = multiprocessing.get_context("fork").Process(target=_long_step, args=(tmp_path / "reason", number))
    began = time.monotonic()
    child.start()
    child.join(30)
    assert child.exitcode == exitcode and time.monotonic() - began < 25  # though there is no room for the summary
    assert f"stopped by {number.name} in a step of more than 0.3 s" in (tmp_path / "reason").read_text()


def test_ranks_stop_for_one_reason(monkeypatch):
    """The first that all agreed on, though one of them alone got a signal: it ends all with an error, or none."""
    of_others: list[int] = []
    monkeypatch.setattr(Stopping, "_max_over_ranks", lambda self, value: max(value, *of_others))
    told = Stopping(None)
    for code in (signal.SIGINT, stopping._TIME_IS_UP):
        of_others[:] = [0, code]
        assert told.should_stop() and told.reason == "stopped by SIGINT"
        with pytest.raises(Stopped, match="SIGINT"):
            told.raise_if_interrupted()
    told = Stopping(None)
    told._signal = signal.SIGINT
    told.raise_if_interrupted()  # no error either of one that came after the last step
    assert told.should_stop() and told.reason == "max_time passed"
    told.raise_if_interrupted()


@pytest.mark.parametrize(
    ("given", "grace"), [(None, 25), ("110", 105), ("6", 3), ("0", 25), ("-9", 25), ("soon", 25), ("", 25)]
)
def test_a_step_has_the_time_that_torchrun_gives(monkeypatch, given, grace):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if given is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", given)
    with Stopping(None) as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        timers = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        (watch,) = (timer for timer in timers if not timer.finished.is_set())  # one that was cancelled may still end
        assert watch.interval == grace
        assert stopping.should_stop() and watch.finished.is_set()  # the checkpoint that follows may take longer


def test_saving_the_model_is_not_left(folder, monkeypatch):
    """Whatever time it takes: all steps are done."""
    save, watches = loop.save_final_model, []

    def signalled(run, target):
        os.kill(os.getpid(), signal.SIGTERM)
        watches.extend(thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        save(run, target)

    monkeypatch.setattr(loop, "save_final_model", signalled)
    main(command(run_values(folder, "run", max_steps=1, save_every="never")))
    assert not watches and (folder / "run" / "model").is_dir()
    assert read_summary(folder)["status"] == "finished"


def test_a_handler_that_was_not_set_from_python_is_no_error_at_the_end(monkeypatch):
    given = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: given.append(handler))  # None: not from Python
    with Stopping(None):
        pass
    assert given[3:] == [signal.SIG_DFL] * 3


def test_a_handler_of_sigusr1_stays():
    """That of submitit, for one, which starts jobs again."""
    own, before = (lambda *_: None), signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, own)
    try:
        with Stopping(None):
            assert signal.getsignal(signal.SIGUSR1) is own
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_group_for_asking_is_given_back(monkeypatch):
    groups = []
    monkeypatch.setattr(engine, "world_size", lambda: 2)
    monkeypatch.setattr(engine, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: groups.append("made") or "group")
    monkeypatch.setattr(torch.distributed, "destroy_process_group", groups.append)
    with Stopping(None):
        pass
    assert groups == ["made", "group"]


def test_max_time_counts_from_the_start_of_the_command(folder, monkeypatch):
    """Data are tokenised and models loaded in the hours that a job has."""
    for seconds in (9, 11):
        assert Stopping(10, began=time.monotonic() - seconds).should_stop() == (seconds > 10)
    before, given = time.monotonic(), []

    class Noted(Stopping):
        def __init__(self, seconds, on_abandon, began):
            given.append((seconds, began))
            super().__init__(seconds, on_abandon, began)

    monkeypatch.setattr(loop, "Stopping", Noted)
    main(command(run_values(folder, "run", max_time="8h", max_steps=1)))
    ((seconds, began),) = given
    assert seconds == 8 * 3600 and before <= began < time.monotonic()


def test_max_time(folder, capsys):
    main(command(run_values(folder, "run", max_time="0.000001s")))
    assert capsys.readouterr().out.splitlines()[-1] == "max_time passed, at step 1/12; the same command continues"
    summary = read_summary(folder)
    assert (summary["status"], summary["reason"], summary["steps"]) == ("stopped", "max_time passed", 1)
    main(command(run_values(folder, "run")))
    assert read_summary(folder)["steps"] == 12
    last = run_values(folder, "last", max_steps=1)  # whose evaluation, due as the run ends, is left
    main(command(last | {"max_time": "0.000001s"}))
    assert "eval_loss" not in curve(folder, "last")[-1]
    main(command(last))
    assert "eval_loss" in curve(folder, "last")[-1]
    assert [seconds_of(t) for t in ("90s", "1.5m", "8h", "2d", "01:02:03", "1-00:00:10")] == [
        90, 90, 28800, 172800, 3723, 86410]  # fmt: skip


@pytest.mark.parametrize(
    "flag", [{"overwrite_output_dir": True}, pytest.param({"resume": "never"}, marks=pytest.mark.full)]
)
def test_the_last_line_says_how_a_run_that_began_anew_goes_on(folder, monkeypatch, capsys, flag):
    stop_at(monkeypatch, 2, short_run_values(folder, "run", **flag))
    name = "--overwrite_output_dir" if "resume" not in flag else "--resume never"
    assert capsys.readouterr().out.rstrip().endswith(f"the same command without {name} continues")


def run_judged(folder, name, ranks, answer=lambda: None):
    """Train 4 steps, judged at every second one; what `answer` says on each rank."""
    sizes = {"model_config": SIZES | STILL | {"num_layers": 2}}
    judged = {"eval_every": 2, "eval_batch_size": 1, "best_metric": "loss", "save_every": 3, "lr": 0.1, **sizes}
    values = short_run_values(folder, name, batch_size=4, global_batch_size=8, **judged, **ranks)

    def on_a_rank():
        main(command(values))
        return answer()

    return on_ranks(on_a_rank, 2, timeout=60) if ranks else [on_a_rank()]


@pytest.fixture(scope="module")
def whole_judged(tmp_path_factory):
    """whole_judged(ranks) -> such a run that nothing stopped, made once; tests only read it."""

    @functools.cache
    def run(*cut):
        folder = write_folder(tmp_path_factory.mktemp("whole"), train=27, dev=4)
        run_judged(folder, "whole", dict(cut))
        return folder / "whole"

    return lambda ranks: run(*ranks.items())


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    "ranks", [{}, *(pytest.param(cut, marks=pytest.mark.full) for cut in ({"zero": 3}, {"pp": 2}))], ids=str
)
def test_an_evaluation_that_a_stop_left_is_made_up_for(folder, whole_judged, monkeypatch, capfd, ranks, written):
    """It takes minutes where texts are written, and launchers wait 30 seconds. Unless its row is there, as in a run
    that ended between the row and the checkpoint: rank 0 alone can read it."""
    calls, whole = [], whole_judged(ranks)

    def asked(stopping):
        calls.append(1)
        if len(calls) == 2 and engine.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return usual(stopping)

    usual = loop.Stopping.should_stop
    with monkeypatch.context() as patch:
        patch.setattr(loop.Stopping, "should_stop", asked)
        asking = run_judged(folder, "run", ranks, lambda: len(calls))
    assert set(asking) == {3}  # after step 1, before the first batch of the evaluation, and after step 2
    assert curve(folder, "run")[-1]["step"] == 2 and "eval_loss" not in curve(folder, "run")[-1]
    assert (folder / "run" / "checkpoints" / "step-00000002").is_dir()
    assert "the same command continues" in capfd.readouterr().out
    if written:
        rows = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
        with (folder / "run" / "metrics.jsonl").open("a") as file:
            file.write(next(row for row in rows if "eval_loss" in row))
    run_judged(folder, "run", ranks)
    assert went_on_after(capfd) == 2
    assert_same_end(folder, "run", whole)
    assert best_of(folder) == best_of(whole.parent, "whole")
