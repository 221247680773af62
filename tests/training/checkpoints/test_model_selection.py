"""Which model is the best, before and after stops, and when a run waits no longer for a better one."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from toydata import command, make_rows, write_folder, write_jsonl
from toyruns import (
    assert_same_end,
    best_of,
    curve,
    read_summary,
    run_values,
    short_run_values,
    stop_at,
    weights,
    went_on_after,
)

import engine
import engine.checkpoint.training
import modelcenter
from engine.testing import run as on_ranks
from modelcenter.training import loop
from modelcenter.training.checkpoints import final_model, model_selection
from modelcenter.training.checkpoints.model_selection import ModelSelection, check_best_metric
from modelcenter.training.config import ClassificationConfig
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27, dev=4)


def test_best_model_and_early_stopping(folder, monkeypatch):
    scores = iter([0.5, 0.9, 0.9, 0.4, 0.3, 0.2])
    judge = loop.Run.evaluate

    def evaluate(self):
        row = judge(self) | {"eval_accuracy": next(scores)}
        self.record.rows[-1].update(row)
        return row

    monkeypatch.setattr(loop.Run, "evaluate", evaluate)
    watched = {"eval_every": 2, "best_metric": "accuracy", "early_stopping": 3, "save_every": "never"}
    main(command(run_values(folder, "run") | watched))
    summary = read_summary(folder)
    assert summary["steps"] == 10 and summary["status"] == "finished" and summary["best"]["step"] == 4
    assert (folder / "run" / "checkpoints" / "best").resolve().name == "step-00000004"
    monkeypatch.undo()
    main(command(run_values(folder, "four") | {"max_steps": 4, "lr_scheduler": "constant"}))
    main(command(run_values(folder, "ten") | {"lr_scheduler": "constant", "eval_every": 4, "best_metric": "loss"}))
    best = read_summary(folder, "ten")["best"]
    assert best["metric"] == "eval_loss"
    losses = {row["step"]: row["eval_loss"] for row in curve(folder, "ten") if "eval_loss" in row}
    assert best["step"] == min(losses, key=losses.get)
    with pytest.raises(ValueError, match="best_metric: got 'f1_x', but the evaluation reports loss, accuracy, f1, mcc"):
        monkeypatch.setattr(loop, "check_best_metric", lambda *_: None)
        main(command(run_values(folder, "wrong", best_metric="f1_x")))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"best_metric": "rouge"}, "best_metric: got 'rouge', expected one of loss, accuracy, f1, mcc$"),
        ({"best_metric": "acc"}, "best_metric: got 'acc', .* Did you mean 'accuracy'"),
        ({"best_metric": "acuracy"}, "best_metric: got 'acuracy', expected one of loss, .* Did you mean 'accuracy'"),
        ({"best_metric": "loss", "eval_data": None}, "best_metric: got no rows to evaluate on; give eval_data"),
        ({"early_stopping": 2, "eval_data": None}, "early_stopping: got no rows to evaluate on"),
    ],
)
def test_what_no_evaluation_gives_is_said_before_the_first_step(folder, changes, says):
    only = {"train_data": [str(folder / "data" / "train.jsonl")]} if "eval_data" in changes else {}
    with pytest.raises(ValueError, match=says):
        main(command(run_values(folder, "run", **only, **changes)))
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.full
def test_the_best_checkpoint_becomes_the_model(folder, monkeypatch):
    judge = ModelSelection.judge
    monkeypatch.setattr(ModelSelection, "judge", lambda self, row: judge(self, row | {"eval_accuracy": -row["step"]}))
    best = {"eval_every": 4, "best_metric": "accuracy", "warmup": 0, "lr_scheduler": "constant"}
    main(command(run_values(folder, "run") | best))
    monkeypatch.undo()
    main(command(run_values(folder, "four") | best | {"max_steps": 4}))
    for key, tensor in weights(folder, "four").items():
        assert torch.equal(tensor, weights(folder, "run")[key]), key


def test_the_best_becomes_the_model_where_a_metric_is_named_alone(monkeypatch):
    loaded = []
    monkeypatch.setattr(final_model, "_load_best_model", lambda run, checkpoints: loaded.append(run.cfg.best_metric))
    monkeypatch.setattr(final_model, "model_card", lambda run: {})
    for metric in (None, "accuracy"):
        cfg = SimpleNamespace(best_metric=metric, lora_rank=None)
        selection = SimpleNamespace(best={"metric": "eval_accuracy", "value": 0.9, "step": 1})
        run: Any = SimpleNamespace(cfg=cfg, selection=selection, step=4, model=None, tokenizer=None)
        run.checkpoints, run.task = mock.Mock(), mock.Mock()
        final_model.save_final_model(run, Path("run") / "model")
        run.checkpoints.wait.assert_called_once()
        run.task.save_model.assert_called_once()
    assert loaded == ["accuracy"]


def test_what_is_the_best_after_a_stop(folder, caplog):
    checkpoints = folder / "run" / "checkpoints"
    main(command(short_run_values(folder, "run", max_steps=2, best_metric="loss")))
    cfg = ClassificationConfig(output_dir=str(folder / "run"), best_metric="loss")
    best = {"metric": "eval_loss", "value": 0.5, "step": 2}
    assert model_selection.still_counts(cfg, "eval_loss", best) and model_selection.still_counts(cfg, "eval_loss", {})
    assert "does not count" not in caplog.text
    assert not model_selection.still_counts(cfg, "eval_accuracy", best)
    assert "loss 0.5 of step 2, does not count: best_metric is now accuracy" in caplog.text
    assert not model_selection.still_counts(cfg, "eval_loss", {**best, "step": 1})  # best names another checkpoint
    (checkpoints / "best").unlink()
    assert not model_selection.still_counts(cfg, "eval_loss", best)
    assert "its checkpoint is damaged or not in output_dir" in caplog.text
    cfg.best_metric, cfg.early_stopping = None, 3
    assert model_selection.still_counts(cfg, "eval_loss", best)  # no model is made of it


@pytest.mark.full
def test_the_best_of_another_folder_is_not_looked_for_at_the_end(folder):
    """Its checkpoint is not there: the run would fail after its last step."""
    judged = {"best_metric": "loss", "eval_every": "2", "train_data": str(folder / "data")}
    main(command(short_run_values(folder, "run", **judged)))
    main(command(short_run_values(folder, "next", resume=str(folder / "run"), max_steps=6, lr=50, **judged)))
    summary = read_summary(folder, "next")
    assert summary["status"] == "finished" and (folder / "next" / "model").is_dir()


@pytest.mark.full
def test_patience_that_was_over_takes_no_further_step(folder, monkeypatch, capfd):
    """Stopped between the last evaluation and the end, a run goes on to the same end."""
    judged = {"max_steps": 12, "eval_every": "1", "save_every": "1", "early_stopping": 2, "lr": 0}
    main(command(short_run_values(folder, "whole", **judged)))

    def fail(run, target):
        raise OSError("no room")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
        patch.setattr(loop, "save_final_model", fail)
        main(command(short_run_values(folder, "run", **judged)))
    main(command(short_run_values(folder, "run", **judged)))
    assert went_on_after(capfd) == 3
    assert [row["step"] for row in curve(folder, "run") if "loss" in row] == [1, 2, 3]
    assert_same_end(folder, "run")


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
    main(command(short_run_values(folder, "run", best_metric="loss", eval_every=1, save_every="never")))
    said = capsys.readouterr().out
    assert (f"of step {step} (loss {losses[step]:.4f})" in said) == (step != 4)
    assert ("the best model, of step 3, is missing" in said) == bool(lost)
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


def test_the_card_tells_the_scores_of_the_model_that_is_kept(folder, monkeypatch):
    judged_as(monkeypatch, {1: 0.5, 2: 0.875, 3: 0.25})
    main(command(short_run_values(folder, "run", best_metric="accuracy", eval_every=1, max_steps=3)))
    card = (folder / "run" / "model" / "README.md").read_text()
    assert "| accuracy | 0.875 |" in card and "value: 0.875" in card and "0.25 " not in card
    assert "The model is that of step 2, the best by accuracy." in card
    main(command(short_run_values(folder, "last", eval_every=1, max_steps=3)))
    card = (folder / "last" / "model" / "README.md").read_text()
    assert "| accuracy | 0.25 |" in card and "The model is that" not in card


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), None])
def test_a_score_that_is_no_number_is_not_the_best(folder, monkeypatch, worst):
    judged_as(monkeypatch, {1: worst, 2: 0.5, 3: 0.25})
    main(command(short_run_values(folder, "run", best_metric="accuracy", early_stopping=2, eval_every=1, max_steps=3)))
    assert best_of(folder) == "step-00000002"
    assert read_summary(folder)["steps"] == 3


def test_best_names_the_best_of_those_that_are_saved(folder, monkeypatch):
    """Step 3 is better than what is saved, step 5 better than what is saved but not than step 3; before a stop too."""
    judged_as(monkeypatch, {1: 0.2, 2: 0.5, 3: 0.9, 4: 0.7, 5: 0.8, 6: 0.6})
    often = {"eval_every": 1, "save_every": 2, "max_steps": 6, "keep": 1}
    stop_at(monkeypatch, 3, short_run_values(folder, "run", **often))
    assert best_of(folder) == "step-00000004"
    (folder / "run" / "checkpoints" / "best").unlink()  # as if it had been killed before that was named
    main(command(short_run_values(folder, "run", **often)))
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
    main(command(short_run_values(folder, "run", best_metric="accuracy", eval_every=1, save_every=1, max_steps=3)))
    assert best_of(folder) == "step-00000003"


def test_best_does_not_count_a_lost_checkpoint_after_which_another_could_not_be_begun():
    """The wait after that one finds nothing that failed."""
    selection = ModelSelection("accuracy", None)
    selection.judge({"step": 1, "eval_accuracy": 0.9})
    selection.checkpoint_started(selection.would_be_best_on_disk(1))
    selection.checkpoint_ended(written=False)
    selection.checkpoint_ended(written=True)
    assert selection.best_on_disk == {} and selection.would_be_best_on_disk(1)


def test_patience_is_over_after_so_many_in_a_row():
    selection, over = ModelSelection("accuracy", 2), []
    for step, score in enumerate((0.5, 0.4, 0.6, 0.5, 0.6)):  # which is no better than the third
        selection.judge({"step": step, "eval_accuracy": score})
        over.append(selection.patience_is_over)
    assert over == [False, False, False, False, True]


def test_a_step_that_was_not_judged_is_not_the_best():
    """Though its checkpoint may be the first behind an evaluation that is."""
    selection = ModelSelection("accuracy", None)
    selection.judge({"step": 2, "eval_accuracy": 0.9})
    assert selection.would_be_best_on_disk(2) and not selection.would_be_best_on_disk(3)


def test_a_step_that_was_judged_again_has_its_newest_score():
    """As one is after a stop, where the evaluation data are others."""
    selection = ModelSelection("accuracy", None)
    rows = [{"step": 2, "eval_accuracy": 0.9}, {"step": 2, "eval_accuracy": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3}]
    selection.fall_back(2, rows)
    assert selection.best == {"metric": "eval_accuracy", "value": 0.5, "step": 2}
    selection.fall_back(3, rows)
    assert selection.best == {}


def test_the_best_that_is_there_counts_after_a_stop_where_a_better_one_was_not_written(folder, monkeypatch):
    judged_as(monkeypatch, {1: 0.5, 2: 0.9, 3: 0.3, 4: 0.4})
    losing(monkeypatch, 2)
    judged = {"best_metric": "accuracy", "eval_every": 1, "save_every": 1}
    stop_at(monkeypatch, 2, short_run_values(folder, "run", **judged))
    main(command(short_run_values(folder, "run", **judged)))
    assert best_of(folder) == "step-00000001"


def test_the_best_of_a_save_that_was_killed_before_it_was_named_counts(folder, monkeypatch):
    """The checkpoints of steps 3 and 4 are complete, but `best` and `last` still name earlier ones."""
    judged_as(monkeypatch, {1: 0.5, 2: 0.6, 3: 0.9, 4: 0.3, 5: 0.4})
    judged = short_run_values(folder, "run", best_metric="accuracy", eval_every=1, save_every=1, max_steps=5)
    clear_up = engine.checkpoint.training.clear_up
    with monkeypatch.context() as patch:
        patch.setattr(engine.checkpoint.training, "clear_up", lambda *a: clear_up(*a) if a[1] < 3 else None)
        stop_at(monkeypatch, 3, judged)
    assert best_of(folder) == "step-00000002"
    main(command(judged))
    assert best_of(folder) == "step-00000003"
    assert sorted(p.name for p in (folder / "run" / "checkpoints").iterdir()) == [
        "best", "last", "step-00000003", "step-00000004", "step-00000005"
    ]  # fmt: skip


def test_the_best_of_other_evaluation_data_does_not_count(folder, monkeypatch, caplog):
    """Nor do the evaluations that were worse."""
    judged_as(monkeypatch, {1: 0.9, 2: 0.8, 3: 0.2, 4: 0.3})
    judged = {"best_metric": "accuracy", "eval_every": 1, "early_stopping": 2}
    stop_at(monkeypatch, 1, short_run_values(folder, "run", **judged))
    write_jsonl(folder / "data" / "dev.jsonl", make_rows(4, seed=9))
    main(command(short_run_values(folder, "run", **judged)))
    assert best_of(folder) == "step-00000004"
    assert "accuracy 0.9 of step 1, does not count: eval_data has changed" in caplog.text
    assert read_summary(folder)["best"]["step"] == 4


def test_scores_of_another_search_do_not_compare():
    from modelcenter.training.config import Seq2SeqConfig

    rows = SimpleNamespace(fingerprint=lambda: {"rows": 3, "sha256": {"a": "x"}})
    moved = SimpleNamespace(fingerprint=lambda: {"rows": 3, "sha256": {"b": "x"}})
    before, now = (model_selection.evaluation_conditions(Seq2SeqConfig(num_beams=n), rows) for n in (1, 4))
    changed = model_selection.changed_condition
    assert changed(before, now) == "num_beams" and changed({}, now) is None
    assert changed(now, model_selection.evaluation_conditions(Seq2SeqConfig(num_beams=4), moved)) is None
    assert changed(now, model_selection.evaluation_conditions(Seq2SeqConfig(), None)) is None  # nothing is scored


@pytest.mark.parametrize(
    ("kind", "flag", "other"),
    [
        ("DPOConfig", "loss_type", "ipo"),
        ("DPOConfig", "label_smoothing", 0.1),
        ("MLMConfig", "mask_fraction", 0.4),
        ("QAConfig", "null_threshold", 2.0),
        ("ClassificationConfig", "max_length", 8),
        ("ClassificationConfig", "label_column", "other"),
        ("ClassificationConfig", "seed", 1),
        ("ClassificationConfig", "label_smoothing", None),
        ("ClassificationConfig", "lr", None),
    ],
)
def test_scores_under_other_flags_of_evaluations_do_not_compare(kind, flag, other):
    """None: the flag is of training alone."""
    from modelcenter.training import config

    rows = SimpleNamespace(fingerprint=lambda: {"rows": 3})
    held_out = {} if kind == "QAConfig" else {"eval_fraction": 0.5}
    before = model_selection.evaluation_conditions(getattr(config, kind)(**held_out), rows)
    flags = {**held_out, flag: 0.2 if other is None else other}
    now = model_selection.evaluation_conditions(getattr(config, kind)(**flags), rows)
    assert model_selection.changed_condition(before, now) == (None if other is None else flag)
    older = {name: value for name, value in before.items() if name != flag}  # of a version that did not keep it
    assert model_selection.changed_condition(older, now) is None


def test_the_best_under_other_flags_ends_no_run_that_goes_on_with_its_weights(folder, monkeypatch, caplog):
    """Losses of DPO and of IPO, or of short and of long texts, are on different scales."""
    judged_as(monkeypatch, {1: 0.9, 2: 0.1, 3: 0.2, 4: 0.3})
    judged = {"eval_every": 1, "early_stopping": 2, "max_length": 12}
    stop_at(monkeypatch, 1, short_run_values(folder, "run", **judged))
    judged |= {"max_length": 10, "resume": str(folder / "run")}
    main(command(short_run_values(folder, "other", **judged)))
    summary = read_summary(folder, "other")
    assert (summary["steps"], summary["best"]["step"]) == (4, 4)
    assert "accuracy 0.9 of step 1, does not count: max_length has changed" in caplog.text


def test_an_evaluation_without_the_metric_of_now_is_made_again():
    rows = [{"step": 3, "loss": 1.0}, {"step": 3, "eval_loss": 1.0}]
    for metric, found in (("loss", rows[1]), ("accuracy", None)):
        run = SimpleNamespace(record=SimpleNamespace(rows=rows), step=3, selection=ModelSelection(metric, None))
        run.changed_condition = None
        assert loop.Run._row_of_this_step(run) is found
        run.step = 4
        assert loop.Run._row_of_this_step(run) is None
        run.step, run.changed_condition = 3, "eval_data"
        assert loop.Run._row_of_this_step(run) is None


@pytest.mark.full
def test_ranks_agree_on_the_best_model_that_takes_the_place_of_a_lost_one(folder, monkeypatch, capfd):
    """Its evaluation is of before a stop: rank 0 alone has it on the disk."""
    judged_as(monkeypatch, {1: 0.2, 2: 0.5, 3: 0.3, 4: 0.9, 5: 0.1})
    values = short_run_values(folder, "run", best_metric="accuracy", eval_every=1, max_steps=5, batch_size=4)
    on_ranks(lambda: stop_at(monkeypatch, 2, values), 2, timeout=60)
    losing(monkeypatch, 4)
    on_ranks(lambda: main(command(values)), 2, timeout=60)
    assert "the best model, of step 4, is missing; that of step 2 is used instead" in capfd.readouterr().out


def test_a_damaged_best_checkpoint_does_not_keep_a_run_from_going_on(folder, monkeypatch, caplog, capsys):
    """Nor from ending."""
    judged = {"best_metric": "accuracy", "eval_every": 1, "max_steps": 6}
    judged_as(monkeypatch, {1: 0.2, 2: 0.5, 3: 0.6, 4: 0.3, 5: 0.4, 6: 0.1})
    stop_at(monkeypatch, 2, short_run_values(folder, "run", **judged))
    assert best_of(folder) == "step-00000003"

    best = folder / "run" / "checkpoints" / "best"

    def damage():
        victim = next(p for p in (best / "model").iterdir() if p.stat().st_size > 1000)
        victim.write_bytes(victim.read_bytes()[:-7])

    damage()
    with pytest.warns(UserWarning, match="checkpoint passed over: .*step-00000003"):
        stop_at(monkeypatch, 4, short_run_values(folder, "run", **judged))
    assert "does not count" not in caplog.text  # that of step 2, from which the run goes on, is the best again
    assert best_of(folder) == "step-00000003"  # again, of the step that was taken anew
    save = loop.save_final_model
    monkeypatch.setattr(loop, "save_final_model", lambda run, target: (damage(), save(run, target)))
    main(command(short_run_values(folder, "run", **judged)))
    assert "the best checkpoint is ignored: " in caplog.text
    said = capsys.readouterr().out
    assert "the best model, of step 3, is missing; the last one is used instead" in said
    assert (folder / "run" / "model").is_dir() and "of step" not in said.splitlines()[-1]


def test_patience_is_not_that_of_another_folder(folder, monkeypatch):
    judged_as(monkeypatch, dict.fromkeys(range(1, 9), 0.5))
    judged = {"eval_every": 1, "early_stopping": 2}
    main(command(short_run_values(folder, "run", max_steps=5, **judged)))
    assert curve(folder, "run")[-1]["step"] == 3
    saved = sorted(p.name for p in (folder / "run" / "checkpoints").glob("step-*"))
    assert saved == [f"step-{step:08d}" for step in (1, 2, 3)]  # the best, that of save_every and the last
    assert best_of(folder) == saved[0]
    main(command(short_run_values(folder, "next", max_steps=8, resume=str(folder / "run"), **judged)))
    assert curve(folder, "next")[-1]["step"] == 5


def test_a_metric_of_pretraining_that_is_misspelt_is_said_before_the_first_step():
    from modelcenter.training.config import PretrainLMConfig
    from modelcenter.training.tasks.pretraining.causal import CausalPretraining

    task = CausalPretraining(cfg=PretrainLMConfig())
    check_best_metric(PretrainLMConfig(best_metric="perplexity"), task, [])
    with pytest.raises(ValueError, match=r"best_metric: got 'perplexty', expected one of loss, perplexity\. Did you"):
        check_best_metric(PretrainLMConfig(best_metric="perplexty"), task, [])


def test_a_metric_that_takes_a_flag_is_one_with_that_flag_alone():
    from modelcenter.data.table import Table
    from modelcenter.training.config import LMConfig
    from modelcenter.training.tasks.lm import LanguageModelling

    cfg = LMConfig(best_metric="accuracy", token_accuracy=True)
    check_best_metric(cfg, LanguageModelling(cfg=cfg, table=Table({}, []), rows=[]), [])
    cfg = LMConfig(best_metric="accuracy")
    with pytest.raises(ValueError, match=r"best_metric: got 'accuracy', expected one of loss, perplexity$"):
        check_best_metric(cfg, LanguageModelling(cfg=cfg, table=Table({}, []), rows=[]), [])


def test_a_metric_of_groups_is_one_where_rows_have_them():
    from modelcenter.data.schemas.columns import Columns
    from modelcenter.data.schemas.labels import Labels
    from modelcenter.data.schemas.text_pairs import PairColumns
    from modelcenter.data.table import Table
    from modelcenter.training.config import Seq2SeqConfig
    from modelcenter.training.tasks.classification import Classification
    from modelcenter.training.tasks.seq2seq import SequenceToSequence

    table, labels = Table({}, []), Labels("single_label_classification", ("bad", "good"))
    classes = Classification(table=table, columns=Columns("text"), labels=labels)
    cfg = Seq2SeqConfig(metrics=["accuracy"], eval_generate=True)
    texts = SequenceToSequence(cfg=cfg, table=table, columns=PairColumns("text"), search={})
    for groups in (np.array([0, 0]), None):
        texts.group = None if groups is None else "group"
        for task in (classes, texts):
            said = nullcontext() if groups is not None else pytest.raises(ValueError, match="best_metric: got 'exact_m")
            with said:
                check_best_metric(ClassificationConfig(best_metric="exact_match"), task, SimpleNamespace(groups=groups))


def test_errors_and_rewards_of_rejected_answers_are_to_be_small():
    names = ("loss", "eval_perplexity", "mse", "rejected", "chosen", "eval_f1")
    assert [name for name in names if ModelSelection(name, None).smaller_is_better] == list(names[:4])
