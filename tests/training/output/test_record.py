"""The rows of a run: on a full disk, and after a stop."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from toydata import command, write_folder
from toyruns import run_values

import engine
from engine.testing import run as on_ranks
from modelcenter.training import loop
from modelcenter.training.output.record import Record, truncate_rows
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


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
        says = f"{name} cannot be written, the run continues without its rows: No space left on device; "
        assert said.count(says) == 1


def test_a_summary_that_finds_no_room_is_an_error_with_its_name(tmp_path):
    record = Record(tmp_path, 3, writer=True)
    (tmp_path / ".summary.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/summary.json'"):
        record.close({})


def test_a_summary_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Or a power cut may leave an empty one."""
    summary, synced = tmp_path / "summary.json", []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append((os.fstat(handle).st_size, summary.exists())))
    Record(tmp_path, 3, writer=True).close({"steps": 2})
    assert (summary.stat().st_size, False) in synced


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
    def close(self, summary, finish):
        if self.path is not None:
            raise OSError(28, "No space left on device", "summary.json")

    def run():
        with pytest.raises(OSError, match="No space left on device") as error:
            main(command(run_values(folder, "run", max_steps=1)))
        return str(error.value)

    monkeypatch.setattr(Record, "close", close)
    first, second = on_ranks(run, 2)
    assert "summary.json" in first and second.startswith("rank 0 failed while writing summary.json: ")


def test_all_ranks_know_the_rows_that_rank_0_can_read(tmp_path):
    """Of a run that goes on: they decide whether its evaluation is made up for, and which one was the best."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "eval_loss": 0.5}\n{"step": 3}\n')

    def rows():
        engine.init_distributed()
        cfg = SimpleNamespace(dry_run=False, trackers=None)
        run = SimpleNamespace(output=tmp_path, batch_source=SimpleNamespace(steps=4), step=2, cfg=cfg)
        return loop.Run._open_record(run, SimpleNamespace(in_output_dir=True)).rows

    assert on_ranks(rows, 2) == [[{"step": 2, "eval_loss": 0.5}]] * 2


def test_skipped_steps_name_their_rows(folder, monkeypatch):
    good, calls = loop.accumulate, []

    def accumulate(model, *args, **kwargs):
        loss = good(model, *args, **kwargs)
        calls.append(1)
        if len(calls) in (3, 4):
            next(model.parameters()).grad.fill_(float("inf"))
        return loss

    monkeypatch.setattr(loop, "accumulate", accumulate)
    main(command(run_values(folder, "run", log_every=5) | {"log_every": 5}))
    with open(folder / "run" / "skipped.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert [row["step"] for row in rows] == [3, 4] and all(row["rows"].count("train.jsonl, line") >= 3 for row in rows)


def test_lines_that_are_no_rows_are_cut_out(tmp_path):
    lines = [
        '{"step": 1}',
        "[" * 5000,
        '{"step": "x"}',
        '{"step": null}',
        "[1, 2]",
        '"x"',
        "3",
        '{"a": 1}',
        "\0\0",
        '{"step": 2}',
        '{"step": 3}',
        '{"step": 4, "l',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert truncate_rows(tmp_path / "metrics.jsonl", 2) == [{"step": 1}, {"step": 2}]
