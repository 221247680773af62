"""Runs that go on elsewhere, with other flags, or beside another: what counts then."""

import json
import multiprocessing
import os
import platform
import re
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toydata import SIZES, STILL, command, flags, make_rows, write_folder, write_jsonl
from toyruns import assert_same_end, curve, die_at, went_on_after

import engine
import engine.checkpoint.training
import modelcenter
from engine.testing import run as on_ranks
from modelcenter.training import loop
from modelcenter.training.checkpoints import fingerprints, model_selection, resume
from modelcenter.training.checkpoints.model_selection import ModelSelection, check_best_metric
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.output.lock import lock_folder
from modelcenter.training.output.record import truncate_rows
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27, dev=4)


def values_of(folder, name, **changes):
    return flags(folder, **{"output_dir": str(folder / name), "max_steps": 4, "save_every": 2} | changes)


def stop_at(monkeypatch, step, values):
    with monkeypatch.context() as patch:
        die_at(patch, step, signal.SIGTERM)
        main(command(values))


def test_more_steps_and_other_rates_are_those_of_the_flags(folder, monkeypatch):
    main(command(values_of(folder, "run")))
    seen = {}

    def train(self):
        seen["groups"] = [{**group, "params": None} for group in self.manager.optimizers[0].param_groups]
        seen["before"] = self.step
        return usual(self)

    usual = loop.Run.train
    monkeypatch.setattr(loop.Run, "train", train)
    more = {"max_steps": 10, "lr": 1e-3, "weight_decay": 0.5, "adam_beta2": 0.9, "warmup": 0}
    main(command(values_of(folder, "more", resume=str(folder / "run"), **more)))
    assert seen["before"] == 4
    assert [group["weight_decay"] for group in seen["groups"]] == [0.5, 0.0]
    assert seen["groups"][0]["betas"] == (0.9, 0.9)
    rates = {row["step"]: row["lr"] for row in curve(folder, "more") if "lr" in row}
    assert rates == pytest.approx({step: 1e-3 * (11 - step) / 10 for step in range(5, 11)})


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [("optimizer", "adamw", "lion"), ("precision", "fp16", "bf16"), ("precision", "fp32", "fp16")],
)
def test_a_state_that_is_of_no_use_is_said_with_what_to_do(name, before, now, tmp_path):
    found = resume.Continuation(tmp_path / "step-00000004", 4, {name: before}, None, forced=True)
    said = (
        f"{name}: got '{now}', which has no use for .*step-00000004 keeps for '{before}'.*: --model .*step-00000004 and"
    )
    with pytest.raises(ValueError, match=said):
        found.check(ClassificationConfig(**{name: now}), None)
    found.check(ClassificationConfig(**{name: before}), None)
    resume.Continuation(tmp_path, 4, {"precision": "fp32"}, None, forced=True).check(
        ClassificationConfig(precision="bf16"), None
    )


@pytest.mark.full
def test_a_run_that_began_with_another_goes_on_from_its_own_checkpoints(folder, monkeypatch, capsys):
    main(command(values_of(folder, "run")))
    began = values_of(folder, "next", resume=str(folder / "run"), max_steps=8)
    main(command({**began, "output_dir": str(folder / "whole")}))
    stop_at(monkeypatch, 6, began)
    assert "the same command goes on" in capsys.readouterr().out
    main(command(began))
    assert "going on after step 7" in capsys.readouterr().out
    assert_same_end(folder, "next")

    newest = folder / "run" / "checkpoints" / "step-00000004"
    (folder / "run" / "summary.json").unlink()  # as if it had been stopped
    with pytest.raises(ValueError, match="resume: .*step-00000002 is not the newest .*step-00000004 is.*--output_dir"):
        main(command(values_of(folder, "run", resume=str(newest.with_name("step-00000002")))))
    (folder / "next" / "summary.json").unlink()
    with pytest.raises(ValueError, match="resume: .*next.*did not begin with .*step-00000002"):
        main(command({**began, "resume": str(newest.with_name("step-00000002"))}))
    assert newest.is_dir() and curve(folder, "run")[-1]["step"] == 4  # a mistake costs nothing


def test_what_is_the_best_after_a_stop(folder, caplog):
    checkpoints = folder / "run" / "checkpoints"
    main(command(values_of(folder, "run", max_steps=2, best_metric="loss")))
    cfg = ClassificationConfig(output_dir=str(folder / "run"), best_metric="loss")
    best = {"metric": "eval_loss", "value": 0.5, "step": 2}
    assert model_selection.still_counts(cfg, "eval_loss", best) and model_selection.still_counts(cfg, "eval_loss", {})
    assert "does not count" not in caplog.text
    assert not model_selection.still_counts(cfg, "eval_accuracy", best)
    assert "loss 0.5 of step 2, does not count: best_metric is accuracy now" in caplog.text
    assert not model_selection.still_counts(cfg, "eval_loss", {**best, "step": 1})  # best names another checkpoint
    (checkpoints / "best").unlink()
    assert not model_selection.still_counts(cfg, "eval_loss", best)
    assert "its checkpoint is not in output_dir" in caplog.text
    cfg.best_metric, cfg.early_stopping = None, 3
    assert model_selection.still_counts(cfg, "eval_loss", best)  # no model is made of it


@pytest.mark.full
def test_the_best_of_another_folder_is_not_looked_for_at_the_end(folder):
    """Its checkpoint is not there: the run would fail after its last step."""
    judged = {"best_metric": "loss", "eval_every": "2", "train_data": str(folder / "data")}
    main(command(values_of(folder, "run", **judged)))
    main(command(values_of(folder, "next", resume=str(folder / "run"), max_steps=6, lr=50, **judged)))
    summary = json.loads((folder / "next" / "summary.json").read_text())
    assert summary["status"] == "finished" and (folder / "next" / "model").is_dir()


@pytest.mark.full
def test_patience_that_was_over_takes_no_further_step(folder, monkeypatch, capfd):
    """Stopped between the last evaluation and the end, a run goes on to the same end."""
    judged = {"max_steps": 12, "eval_every": "1", "save_every": "1", "early_stopping": 2, "lr": 0}
    main(command(values_of(folder, "whole", **judged)))

    def fail(run, target):
        raise OSError("no room")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
        patch.setattr(loop, "save_final_model", fail)
        main(command(values_of(folder, "run", **judged)))
    main(command(values_of(folder, "run", **judged)))
    assert went_on_after(capfd) == 3
    assert [row["step"] for row in curve(folder, "run") if "loss" in row] == [1, 2, 3]
    assert_same_end(folder, "run")


@pytest.mark.parametrize(
    "flag", [{"overwrite_output_dir": True}, pytest.param({"resume": "never"}, marks=pytest.mark.full)]
)
def test_the_last_line_says_how_a_run_that_began_anew_goes_on(folder, monkeypatch, capsys, flag):
    stop_at(monkeypatch, 2, values_of(folder, "run", **flag))
    name = "--overwrite_output_dir" if "resume" not in flag else "--resume never"
    assert capsys.readouterr().out.rstrip().endswith(f"the same command without {name} goes on")


def test_a_checkpoint_that_could_not_be_written_does_not_cost_the_next(folder, monkeypatch, capsys):
    """Not even that of a stop, for which the disk has room again."""
    write, calls = engine.checkpoint.training._write, []

    def fails_once(job, group):
        calls.append(job.step)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        write(job, group)

    monkeypatch.setattr("engine.checkpoint.training._write", fails_once)
    stop_at(monkeypatch, 2, values_of(folder, "run"))
    assert calls == [2, 3] and (folder / "run" / "checkpoints" / "step-00000003").is_dir()
    assert "the last checkpoint could not be written: [Errno 28] No space left on device" in capsys.readouterr().out


@pytest.mark.parametrize(("lost", "step"), [((), 3), ((3,), 1), ((1, 3), 4)])
def test_a_best_model_that_was_not_written_is_not_claimed(folder, monkeypatch, capsys, lost, step):
    """model/ is the best one that there is, and the last line says which."""
    losses = {1: 3.0, 2: 4.0, 3: 1.0, 4: 2.0}

    def evaluate(self):
        row = {"step": self.step, "epoch": 0.0, "eval_loss": losses[self.step]}
        self.record.log(row)
        return row

    losing(monkeypatch, *lost)
    monkeypatch.setattr(loop.Run, "evaluate", evaluate)
    main(command(values_of(folder, "run", best_metric="loss", eval_every=1, save_every="never")))
    said = capsys.readouterr().out
    assert (f"of step {step} (loss {losses[step]:.4f})" in said) == (step != 4)
    assert ("the best model, of step 3, is not there" in said) == bool(lost)
    made = modelcenter.from_pretrained(str(folder / "run" / "model")).state_dict()
    if step != 4:
        best = modelcenter.from_pretrained(str(folder / "run" / "checkpoints" / "best")).state_dict()
        assert all(torch.equal(tensor, made[name]) for name, tensor in best.items())


def judged_as(monkeypatch, scores):
    """Let the evaluation of each step have this accuracy."""

    def evaluate(self):
        row = {"step": self.step, "epoch": 0.0, "eval_loss": 1.0, "eval_accuracy": scores[self.step]}
        self.record.log(row)
        return row

    monkeypatch.setattr(loop.Run, "evaluate", evaluate)


def best_of(folder, name="run"):
    return (folder / name / "checkpoints" / "best").resolve().name


def test_the_card_tells_the_scores_of_the_model_that_is_kept(folder, monkeypatch):
    judged_as(monkeypatch, {1: 0.5, 2: 0.875, 3: 0.25})
    main(command(values_of(folder, "run", best_metric="accuracy", eval_every=1, max_steps=3)))
    card = (folder / "run" / "model" / "README.md").read_text()
    assert "| accuracy | 0.875 |" in card and "value: 0.875" in card and "0.25 " not in card
    assert "The model is that of step 2, the best by accuracy." in card
    main(command(values_of(folder, "last", eval_every=1, max_steps=3)))
    card = (folder / "last" / "model" / "README.md").read_text()
    assert "| accuracy | 0.25 |" in card and "The model is that" not in card


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), None])
def test_a_score_that_is_no_number_is_not_the_best(folder, monkeypatch, worst):
    judged_as(monkeypatch, {1: worst, 2: 0.5, 3: 0.25})
    main(command(values_of(folder, "run", best_metric="accuracy", early_stopping=2, eval_every=1, max_steps=3)))
    assert best_of(folder) == "step-00000002"
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 3


def test_best_names_the_best_of_those_that_are_saved(folder, monkeypatch):
    """Step 3 is better than what is saved, step 5 better than what is saved but not than step 3; before a stop too."""
    judged_as(monkeypatch, {1: 0.2, 2: 0.5, 3: 0.9, 4: 0.7, 5: 0.8, 6: 0.6})
    often = {"eval_every": 1, "save_every": 2, "max_steps": 6, "keep": 1}
    stop_at(monkeypatch, 3, values_of(folder, "run", **often))
    assert best_of(folder) == "step-00000004"
    main(command(values_of(folder, "run", **often)))
    assert best_of(folder) == "step-00000004"
    assert sorted(p.name for p in (folder / "run" / "checkpoints").glob("step-*")) == ["step-00000004", "step-00000006"]


def losing(monkeypatch, *steps):
    """Let the checkpoints of these steps find no room."""
    write = engine.checkpoint.training._write

    def fails(job, group):
        if job.step in steps:
            raise OSError(28, "No space left on device")
        write(job, group)

    monkeypatch.setattr("engine.checkpoint.training._write", fails)


def test_best_does_not_count_a_checkpoint_that_was_not_written(folder, monkeypatch):
    """Step 3 is worse than step 2, whose checkpoint is lost, and better than that which is there."""
    judged_as(monkeypatch, {1: 0.5, 2: 0.9, 3: 0.7})
    losing(monkeypatch, 2)
    main(command(values_of(folder, "run", best_metric="accuracy", eval_every=1, save_every=1, max_steps=3)))
    assert best_of(folder) == "step-00000003"


def test_the_best_that_is_there_counts_after_a_stop_where_a_better_one_was_not_written(folder, monkeypatch):
    judged_as(monkeypatch, {1: 0.5, 2: 0.9, 3: 0.3, 4: 0.4})
    losing(monkeypatch, 2)
    judged = {"best_metric": "accuracy", "eval_every": 1, "save_every": 1}
    stop_at(monkeypatch, 2, values_of(folder, "run", **judged))
    main(command(values_of(folder, "run", **judged)))
    assert best_of(folder) == "step-00000001"


def test_the_best_of_other_evaluation_data_does_not_count(folder, monkeypatch, caplog):
    """Nor do the evaluations that were worse."""
    judged_as(monkeypatch, {1: 0.9, 2: 0.8, 3: 0.2, 4: 0.3})
    judged = {"best_metric": "accuracy", "eval_every": 1, "early_stopping": 2}
    stop_at(monkeypatch, 1, values_of(folder, "run", **judged))
    write_jsonl(folder / "data" / "dev.jsonl", make_rows(4, seed=9))
    main(command(values_of(folder, "run", **judged)))
    assert best_of(folder) == "step-00000004"
    assert "accuracy 0.9 of step 1, does not count: eval_data is another now" in caplog.text
    assert json.loads((folder / "run" / "summary.json").read_text())["best"]["step"] == 4


def test_scores_of_another_search_do_not_compare():
    from modelcenter.training.config import Seq2SeqConfig

    rows = SimpleNamespace(fingerprint=lambda: {"rows": 3, "sha256": {"a": "x"}})
    moved = SimpleNamespace(fingerprint=lambda: {"rows": 3, "sha256": {"b": "x"}})
    before, now = (model_selection.evaluation_conditions(Seq2SeqConfig(num_beams=n), rows) for n in (1, 4))
    assert (
        model_selection.changed_condition(before, now) == "num_beams"
        and model_selection.changed_condition({}, now) is None
    )
    assert (
        model_selection.changed_condition(now, model_selection.evaluation_conditions(Seq2SeqConfig(num_beams=4), moved))
        is None
    )
    assert (
        model_selection.changed_condition(now, model_selection.evaluation_conditions(Seq2SeqConfig(), None)) is None
    )  # nothing is scored


def test_an_evaluation_without_the_metric_of_now_is_made_again():
    rows = [{"step": 3, "loss": 1.0}, {"step": 3, "eval_loss": 1.0}]
    for metric, found in (("loss", rows[1]), ("accuracy", None)):
        run = SimpleNamespace(record=SimpleNamespace(rows=rows), step=3, selection=ModelSelection(metric, None))
        run.changed_condition = None
        assert loop.Run._row_of_this_step(run) is found
        run.changed_condition = "eval_data"
        assert loop.Run._row_of_this_step(run) is None


@pytest.mark.full
def test_ranks_agree_on_the_best_model_that_takes_the_place_of_a_lost_one(folder, monkeypatch, capfd):
    """Its evaluation is of before a stop: rank 0 alone has it on the disk."""
    judged_as(monkeypatch, {1: 0.2, 2: 0.5, 3: 0.3, 4: 0.9, 5: 0.1})
    values = values_of(folder, "run", best_metric="accuracy", eval_every=1, max_steps=5, batch_size=4)
    on_ranks(lambda: stop_at(monkeypatch, 2, values), 2, timeout=60)
    losing(monkeypatch, 4)
    on_ranks(lambda: main(command(values)), 2, timeout=60)
    assert "the best model, of step 4, is not there; that of step 2 takes its place" in capfd.readouterr().out


def test_a_damaged_best_checkpoint_does_not_keep_a_run_from_going_on(folder, monkeypatch, caplog, capsys):
    """Nor from ending."""
    judged = {"best_metric": "accuracy", "eval_every": 1, "max_steps": 6}
    judged_as(monkeypatch, {1: 0.2, 2: 0.5, 3: 0.6, 4: 0.3, 5: 0.4, 6: 0.1})
    stop_at(monkeypatch, 2, values_of(folder, "run", **judged))
    assert best_of(folder) == "step-00000003"

    best = folder / "run" / "checkpoints" / "best"

    def damage():
        victim = next(p for p in (best / "model").iterdir() if p.stat().st_size > 1000)
        victim.write_bytes(victim.read_bytes()[:-7])

    damage()
    with pytest.warns(UserWarning, match="checkpoint passed over: .*step-00000003"):
        stop_at(monkeypatch, 4, values_of(folder, "run", **judged))
    assert "the best checkpoint is passed over: " in caplog.text
    assert best_of(folder) == "step-00000003"  # again, of the step that was taken anew
    save = loop.save_final_model
    monkeypatch.setattr(loop, "save_final_model", lambda run, target: (damage(), save(run, target)))
    main(command(values_of(folder, "run", **judged)))
    said = capsys.readouterr().out
    assert "the best model, of step 3, is not there; the last one takes its place" in said
    assert (folder / "run" / "model").is_dir() and "of step" not in said.splitlines()[-1]


@pytest.mark.parametrize("name", ["checkpoints", "model"])
def test_a_link_to_a_folder_elsewhere_stays_one(folder, name):
    elsewhere, precious = folder / "elsewhere", folder / "precious"
    for path in (elsewhere / "old", precious / "weights", folder / "run"):
        path.mkdir(parents=True)
    (elsewhere / "newest").symlink_to("old")
    (elsewhere / "mine").symlink_to(precious)
    (folder / "run" / name).symlink_to(elsewhere)
    main(command(values_of(folder, "run", max_steps=1)))
    assert (folder / "run" / name).is_symlink()
    assert not {"old", "newest", "mine"} & set(os.listdir(elsewhere)) and os.listdir(precious) == ["weights"]
    assert (elsewhere / {"checkpoints": "last", "model": "config.json"}[name]).exists()
    main(command(values_of(folder, "run", max_steps=1, overwrite_output_dir=True)))
    elsewhere.rename(folder / "gone")
    with pytest.raises(ValueError, match=rf"output_dir: .*{name} is a link to .*elsewhere, which is not there; make"):
        main(command(values_of(folder, "run", max_steps=1, overwrite_output_dir=True)))


def test_a_run_that_began_with_its_own_checkpoint_goes_on_as_often_as_it_is_started(folder, monkeypatch, capsys):
    """Also when that checkpoint is no longer there."""
    often = {"save_every": 1, "keep": 1, "max_steps": 6}
    stop_at(monkeypatch, 1, values_of(folder, "run", **often))
    newest = folder / "run" / "checkpoints" / "step-00000002"
    again = values_of(folder, "run", **often, lr=1e-3, resume=str(newest))
    stop_at(monkeypatch, 3, again)
    assert not newest.exists()
    main(command(again))
    assert "going on after step 4" in capsys.readouterr().out


def test_patience_is_not_that_of_another_folder(folder, monkeypatch):
    judged_as(monkeypatch, dict.fromkeys(range(1, 9), 0.5))
    judged = {"eval_every": 1, "early_stopping": 2}
    main(command(values_of(folder, "run", max_steps=5, **judged)))
    assert curve(folder, "run")[-1]["step"] == 3
    main(command(values_of(folder, "next", max_steps=8, resume=str(folder / "run"), **judged)))
    assert curve(folder, "next")[-1]["step"] == 5


def test_a_run_that_has_only_its_model_to_write_prepares_it_too(folder, monkeypatch):
    """The padding token of a decoder, without which transformers classifies no batch."""
    from text_toys import SIZES as DECODERS
    from text_toys import make_decoder_tokenizer

    make_decoder_tokenizer().save_pretrained(folder / "words")
    decoder = {"model": "tiny/gpt2", "model_config": DECODERS["tiny/gpt2"], "tokenizer": str(folder / "words")}

    def fail(run, target):
        raise OSError("no room")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
        patch.setattr(loop, "save_final_model", fail)
        main(command(values_of(folder, "run", max_steps=2, **decoder)))
    main(command(values_of(folder, "run", max_steps=2, **decoder)))
    model = folder / "run" / "model"
    assert json.loads((model / "config.json").read_text())["pad_token_id"] == 0
    assert json.loads((model / "tokenizer_config.json").read_text())["pad_token"] == "<eos>"


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    "ranks", [{}, *(pytest.param(cut, marks=pytest.mark.full) for cut in ({"zero": 3}, {"pp": 2}))], ids=str
)
def test_an_evaluation_that_a_stop_left_is_made_up_for(folder, monkeypatch, capfd, ranks, written):
    """It takes minutes where texts are written, and launchers wait 30 seconds. Unless its row is there, as in a run
    that ended between the row and the checkpoint: rank 0 alone can read it."""
    sizes = {"model_config": SIZES | STILL | {"num_layers": 2}}
    judged = {"eval_every": 2, "eval_batch_size": 1, "best_metric": "loss", "save_every": 3, "lr": 0.1, **sizes}

    def run(name):
        """How often each rank asked whether to stop."""
        values = values_of(folder, name, batch_size=4, global_batch_size=8, **judged, **ranks)

        def on_a_rank():
            main(command(values))
            return len(calls)

        return on_ranks(on_a_rank, 2, timeout=60) if ranks else [on_a_rank()]

    calls = []
    run("whole")

    def asked(stopping):
        calls.append(1)
        if len(calls) == 2 and engine.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return usual(stopping)

    usual = loop.Stopping.should_stop
    with monkeypatch.context() as patch:
        patch.setattr(loop.Stopping, "should_stop", asked)
        assert set(run("run")) == {3}  # after step 1, before the first batch of the evaluation, and after step 2
    assert curve(folder, "run")[-1]["step"] == 2 and "eval_loss" not in curve(folder, "run")[-1]
    assert (folder / "run" / "checkpoints" / "step-00000002").is_dir()
    assert "the same command goes on" in capfd.readouterr().out
    if written:
        rows = (folder / "whole" / "metrics.jsonl").read_text().splitlines(keepends=True)
        with (folder / "run" / "metrics.jsonl").open("a") as file:
            file.write(next(row for row in rows if "eval_loss" in row))
    run("run")
    assert went_on_after(capfd) == 2
    assert_same_end(folder, "run")
    assert best_of(folder) == best_of(folder, "whole")


def test_lines_that_are_no_rows_are_cut_out(tmp_path):
    lines = ['{"step": 1}', "[1, 2]", '"x"', "3", '{"a": 1}', "\0\0", '{"step": 2}', '{"step": 3}', '{"step": 4, "l']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert truncate_rows(tmp_path / "metrics.jsonl", 2) == [{"step": 1}, {"step": 2}]


def _hold(folder, held, done):
    with lock_folder(folder):
        held.set()
        done.wait(30)


def test_two_runs_do_not_share_a_folder(folder, monkeypatch):
    out = folder / "run"
    out.mkdir()
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(out, held, done))
    other.start()
    assert held.wait(30)
    said = f"output_dir: process {other.pid} on {platform.node()} is training in {out}; wait until it has ended"
    with pytest.raises(ValueError, match=re.escape(said)):
        main(command(values_of(folder, "run")))
    assert os.listdir(out) == [".lock"]
    done.set()
    other.join()
    assert os.listdir(out) == []
    monkeypatch.setattr("fcntl.lockf", _no_locks)
    with lock_folder(out):
        pass


def _no_locks(*_):
    raise OSError(95, "Operation not supported")


def test_a_metric_of_pretraining_that_is_misspelt_is_said_before_the_first_step():
    from modelcenter.training.config import PretrainLMConfig
    from modelcenter.training.tasks.causal import CausalLanguageModel

    task = CausalLanguageModel.__new__(CausalLanguageModel)
    check_best_metric(PretrainLMConfig(best_metric="perplexity"), task, [])
    with pytest.raises(ValueError, match=r"best_metric: got 'perplexty', expected one of loss, perplexity\. Did you"):
        check_best_metric(PretrainLMConfig(best_metric="perplexty"), task, [])


def test_a_metric_that_takes_a_flag_is_one_with_that_flag_alone():
    from modelcenter.training.config import LMConfig
    from modelcenter.training.tasks.lm import LanguageModelling

    task = LanguageModelling.__new__(LanguageModelling)
    for task.cfg in (LMConfig(best_metric="accuracy", token_accuracy=True), LMConfig(best_metric="accuracy")):
        if task.cfg.token_accuracy:
            check_best_metric(task.cfg, task, [])
    with pytest.raises(ValueError, match=r"best_metric: got 'accuracy', expected one of loss, perplexity$"):
        check_best_metric(task.cfg, task, [])


def test_a_metric_of_groups_is_one_where_rows_have_them():
    from modelcenter.data.schemas.labels import Labels
    from modelcenter.training.config import Seq2SeqConfig
    from modelcenter.training.tasks.classification import Classification
    from modelcenter.training.tasks.seq2seq import SequenceToSequence

    classes, texts = Classification.__new__(Classification), SequenceToSequence.__new__(SequenceToSequence)
    classes.labels = Labels("single_label_classification", ["bad", "good"])
    texts.cfg = Seq2SeqConfig(metrics=["accuracy"], eval_generate=True)
    for groups in (np.array([0, 0]), None):
        texts.group = None if groups is None else "group"
        for task in (classes, texts):
            said = nullcontext() if groups is not None else pytest.raises(ValueError, match="best_metric: got 'exact_m")
            with said:
                check_best_metric(ClassificationConfig(best_metric="exact_match"), task, SimpleNamespace(groups=groups))


def test_fewer_rewards_of_rejected_answers_are_better():
    assert ModelSelection("rejected", None).smaller_is_better and not ModelSelection("chosen", None).smaller_is_better


def test_the_files_of_streams_and_mixtures_that_changed_are_named():
    def differences(before, now):
        return fingerprints.differences(*({"source": data} for data in (before, now)))

    assert differences({"a": [3, "x"], "b": [1, "y"]}, {"a": [4, "z"], "c": [1, "y"]}) == (
        " (a has changed; b is gone; c is new)"
    )
    assert differences({"a": 1}, {"a": 1}) == ""
    before, now = ({"rows": 9, "parts": [{"sha256": {"a": n}}, {"sha256": "one"}]} for n in (1, 2))
    assert fingerprints.differences(before, now) == " (9 rows now, 9 rows then; a has changed)"
