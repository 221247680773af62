"""Steps whose loss or gradients are not finite: skipped and counted, and too many of them are the end."""

import time

import pytest
from toydata import SIZES, make_rows, write_folder
from toyruns import in_transformers, read_summary, train_classifier

from engine.checkpoint import training
from modelcenter.training import loop


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


def spoil(monkeypatch, steps):
    """Make the gradient of some steps NaN (None: of all)."""
    good, calls = loop.accumulate, []

    def accumulate(model, *args, **kwargs):
        loss = good(model, *args, **kwargs)
        calls.append(1)
        if steps is None or len(calls) in steps:
            next(model.parameters()).grad.fill_(float("nan"))
            loss = loss * float("nan")
        return loss

    monkeypatch.setattr(loop, "accumulate", accumulate)


def test_a_bad_step_is_skipped_and_counted(folder, monkeypatch):
    spoil(monkeypatch, {2})
    rows = train_classifier(folder, max_steps=4)
    assert [row["loss"] is None for row in rows if "loss" in row] == [
        False,
        True,
        False,
        False,
    ]  # null: JSON has no NaN
    assert [row.get("skipped") for row in rows if "loss" in row] == [None, 1, 1, 1]
    assert read_summary(folder)["skipped_steps"] == 1
    logits, _ = in_transformers(folder, make_rows(3))
    assert logits.isfinite().all()


def test_a_run_that_is_left_inside_its_first_step_counts_those_before(folder, monkeypatch):
    """As a process that ends in the middle of a step, some time after a signal, writes its summary."""
    with monkeypatch.context() as patch:
        spoil(patch, {1})
        train_classifier(folder, max_steps=2, max_time="0.000001s")
    leave, counted = [], []

    class Noted(loop.Stopping):
        def __init__(self, seconds, on_abandon, began):
            leave.append(on_abandon)
            super().__init__(seconds, on_abandon, began)

    def accumulate(*args, **kwargs):
        leave[0]("stopped in a step")
        counted.append(read_summary(folder)["skipped_steps"])
        raise KeyError("ended")

    monkeypatch.setattr(loop, "Stopping", Noted)
    monkeypatch.setattr(loop, "accumulate", accumulate)
    with pytest.raises(KeyError, match="ended"):
        train_classifier(folder, max_steps=2)
    assert counted == [1]


def test_bad_steps_in_a_row_end_the_run(folder, monkeypatch):
    spoil(monkeypatch, range(3, 99))
    with pytest.raises(
        FloatingPointError, match=r"step 10: .*not finite in 8 steps in a row.*Rows of.*train.jsonl, line \d+"
    ):
        train_classifier(folder, max_steps=30)
    summary = read_summary(folder)
    assert summary["status"] == "failed" and "not finite in 8 steps" in summary["reason"]
    assert summary["steps"] == 9 and summary["skipped_steps"] == 8 and not (folder / "run" / "model").exists()


def test_a_run_of_bad_steps_only_is_no_success(folder):
    with pytest.raises(FloatingPointError, match="no step of the run had a finite loss.*weights: check the"):
        train_classifier(folder, max_steps=3, model_config=SIZES | {"initializer_range": 1e30})
    assert read_summary(folder)["status"] == "failed"


def test_a_failed_run_may_be_repeated(folder, monkeypatch):
    spoil(monkeypatch, None)
    with pytest.raises(FloatingPointError):
        train_classifier(folder, max_steps=2)
    train_classifier(
        folder, max_steps=9, max_time="0.000001s", output_dir=str(folder / "stopped")
    )  # good steps may yet come
    assert read_summary(folder, "stopped")["status"] == "stopped"
    monkeypatch.undo()
    assert train_classifier(folder, max_steps=2)[-1]["step"] == 2


def test_a_failed_run_may_be_repeated_while_its_checkpoint_is_written(folder, monkeypatch, caplog):
    spoil(monkeypatch, None)
    write = training.write_tensors
    monkeypatch.setattr(training, "write_tensors", lambda *args, **named: (write(*args, **named), time.sleep(1)))
    with pytest.raises(FloatingPointError):
        train_classifier(folder, max_steps=2)
    monkeypatch.undo()
    assert train_classifier(folder, max_steps=2)[-1]["step"] == 2
    assert not [record for record in caplog.records if "could not be written" in record.getMessage()]


def test_a_short_run_in_fp16_may_end_before_its_loss_scale_fits(folder, monkeypatch, capsys):
    good = loop.accumulate

    def accumulate(model, *args, **kwargs):
        loss = good(model, *args, **kwargs)
        next(model.parameters()).grad.fill_(float("inf"))
        return loss

    monkeypatch.setattr(loop, "accumulate", accumulate)
    train_classifier(folder, max_steps=2, precision="fp16")
    assert read_summary(folder)["status"] == "finished"
    assert "no step changed the weights: the loss scale of fp16 is still falling" in capsys.readouterr().out
    spoil(monkeypatch, None)
    with pytest.raises(FloatingPointError, match="no step of the run had a finite loss"):
        train_classifier(folder, max_steps=2, precision="fp16", output_dir=str(folder / "nan"))
