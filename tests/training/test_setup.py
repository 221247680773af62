"""What a run makes sure of before it starts."""

import os
import shutil
import sys
from types import SimpleNamespace

import pytest
from toydata import command, flags, make_rows, write_folder, write_jsonl

import engine
from engine.testing import run as on_ranks
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.output.messages import data_name
from modelcenter.training.output.record import Record
from modelcenter.training.output.trackers import Trackers, selected_trackers
from modelcenter.training.setup.launch import check_shared, claim_output
from scripts.finetune_classification import main


def _look(root, private):
    engine.init_distributed()
    own = root / f"node-{engine.rank()}" if private else root
    own.mkdir(exist_ok=True)
    check_shared(own, patience=0.3)
    engine.synchronize()
    return sorted(p.name for p in own.iterdir())


def test_the_card_names_data_sets_of_the_hub_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("here/tokens.bin", "here/tokens.idx", "here/rows"):
        write_jsonl(tmp_path / name, [])
    for given, name in {
        "nyu-mll/glue": "nyu-mll/glue", "rajpurkar/squad@2": "rajpurkar/squad", "data/*.jsonl": None, "~/x/y": None,
        "here/rows": None, "here/rows@2": None, "here/tokens": None, "here/gone.jsonl": None, "./a/b": None,
    }.items():  # fmt: skip
        assert data_name(ClassificationConfig(train_data=[given])) == name, given
    assert data_name(ClassificationConfig(train_data=["nyu-mll/glue", "here/rows"])) is None


def test_a_folder_that_ranks_do_not_share_is_an_error(tmp_path):
    assert on_ranks(_look, 2, tmp_path, False) == [[], []]
    with pytest.raises(RuntimeError, match=r"output_dir: rank 1 on .* does not see what rank 0 wrote .* all nodes"):
        on_ranks(_look, 2, tmp_path, True)
    assert not list((tmp_path / "node-0").iterdir())


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["tensorbord"], r"trackers: got 'tensorbord', expected some of tensorboard.*Did you mean 'tensorboard'"),
        (["comet_ml"], "trackers: comet_ml needs comet_ml, which is not installed: pip install comet_ml"),
    ],
)
def test_trackers_that_are_not_there(names, says):
    with pytest.raises(ValueError, match=says):
        claim_output(ClassificationConfig(trackers=names))
    assert selected_trackers(["no"]) == []


def test_trackers_get_the_numbers(tmp_path, monkeypatch):
    """accelerate's tracker of another package, which writes what it is told."""
    from accelerate import tracking

    told = []

    class Told(tracking.GeneralTracker):
        name = "trackio"
        requires_logging_directory = False

        def __init__(self, run_name):
            super().__init__()
            told.append(run_name)

        @property
        def tracker(self):
            return None

        def start(self):
            told.append("started")

        def store_init_configuration(self, values):
            told.append(values["lr"])

        @tracking.on_main_process
        def log(self, values, step=None):
            told.append((step, values))

        def finish(self):
            told.append("finished")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio", Told)
    monkeypatch.setitem(sys.modules, "trackio", shutil)
    monkeypatch.setattr("modelcenter.training.output.trackers.find_spec", lambda name: shutil)
    trackers = Trackers(tmp_path / "my-run", ClassificationConfig(trackers=["trackio"], lr=0.5))
    trackers.log({"step": 3, "loss": 0.25, "name": "text", "skipped": 1})
    trackers.close()
    assert told == ["my-run", "started", 0.5, (3, {"loss": 0.25, "skipped": 1}), "finished"]


def test_a_tracker_that_cannot_start_ends_no_run(tmp_path, monkeypatch, capsys):
    def refused(*_):
        raise ConnectionError("no login")

    monkeypatch.setattr("modelcenter.training.output.trackers.selected_trackers", lambda names: names)
    monkeypatch.setattr("modelcenter.training.output.trackers._start", refused)
    record = Record(tmp_path, 3, True, cfg=ClassificationConfig(trackers=["wandb"]))
    record.close({"status": "finished"})
    assert (tmp_path / "summary.json").is_file()
    assert capsys.readouterr().err == "trackers: wandb gets no rows, as it could not be started: no login\n"


def test_a_tracker_that_fails_is_said_once_and_ends_no_run(tmp_path, monkeypatch, capsys):
    def away(*_, **__):
        raise ConnectionError("the server is away")

    started = SimpleNamespace(name="mlflow", log=away, finish=away)
    monkeypatch.setattr("modelcenter.training.output.trackers.selected_trackers", lambda names: names)
    monkeypatch.setattr("modelcenter.training.output.trackers._start", lambda *_: started)
    for name in ("logged", "closed"):
        (tmp_path / name).mkdir()
        record = Record(tmp_path / name, 3, True, cfg=ClassificationConfig(trackers=["mlflow"]))
        for step in (1, 2) if name == "logged" else ():
            record.log({"step": step, "eval_loss": 0.5})
        record.close({"status": "finished"})
        assert (tmp_path / name / "summary.json").is_file()
    assert capsys.readouterr().err.splitlines() == [
        "trackers: mlflow gets no more rows, as it failed: the server is away",
        "trackers: mlflow could not be ended: the server is away",
    ]


def _differ(folder, changes):
    values = flags(folder, output_dir=str(folder / "run"), max_steps=1)
    if int(os.environ["RANK"]) == 1:
        values |= changes
    main(command(values))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": 0.5}, r"lr: rank 1 on .* has 0.5, rank 0 on .* has 0.01; start all ranks with the same"),
        (
            {"train_data": "other"},
            r"train_data: rank 1 on .* has 24 rows of \d+ tokens of its own, rank 0 on .* 24 rows of \d+ tokens of its "
            "own; let all ranks read the same files",
        ),
        # Said by rank 0, which waits for no answer.
        ({"train_data": "broken"}, "rank 1 failed while preparing the rows: .*line 25: the row has no text"),
    ],
    ids=["flags", "data", "rows"],
)
def test_ranks_that_are_given_different_things_are_an_error(tmp_path, changes, says):
    """The same rows at another place are no difference."""
    write_folder(tmp_path)
    write_jsonl(tmp_path / "same" / "train.jsonl", make_rows(24, seed=1))
    write_jsonl(tmp_path / "same" / "dev.jsonl", make_rows(11, seed=2))
    write_jsonl(tmp_path / "other" / "train.jsonl", make_rows(24, seed=3))
    write_jsonl(tmp_path / "broken" / "train.jsonl", [*make_rows(24, seed=1), {"text": None, "label": "good"}])
    here = {k: str(tmp_path / v) if k == "train_data" else v for k, v in changes.items()}
    with pytest.raises(RuntimeError, match=says):
        on_ranks(_differ, 2, tmp_path, here)
    if changes.get("train_data") == "other":
        on_ranks(_differ, 2, tmp_path, {"train_data": str(tmp_path / "same")})
