"""Trackers get the numbers of a run and never end it."""

import shutil
import sys
from types import SimpleNamespace

import pytest

from modelcenter.training.config import ClassificationConfig
from modelcenter.training.output.folder import clear_output
from modelcenter.training.output.record import Record
from modelcenter.training.output.tracker_runs import continuing_options
from modelcenter.training.output.trackers import Trackers, selected_trackers
from modelcenter.training.setup.launch import claim_output


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["tensorbord"], r"trackers: got 'tensorbord', expected some of tensorboard.*Did you mean 'tensorboard'"),
        (["comet_ml"], "trackers: comet_ml needs comet_ml, which is not installed: pip install comet_ml"),
    ],
)
def test_trackers_that_are_not_there(names, says):
    with pytest.raises(ValueError, match=says), claim_output(ClassificationConfig(trackers=names)):
        pass


@pytest.mark.parametrize("words", [["--trackers", "no"], ["--report_to", "none"], ["--log_with", "No", "None"]])
def test_no_trackers(words, tmp_path):
    """As the Hugging Face Trainer says it, too, here and in the file of flags."""
    cfg = ClassificationConfig.from_args(words)
    cfg.save(tmp_path / "config.yaml")
    for flags in (cfg, ClassificationConfig.from_yaml(tmp_path / "config.yaml")):
        assert flags.trackers is not None and selected_trackers(flags.trackers) == []
    (tmp_path / "theirs.yaml").write_text("report_to: none")
    assert ClassificationConfig.from_yaml(tmp_path / "theirs.yaml").trackers == ["no"]
    assert ClassificationConfig.from_args([]).trackers is None


def test_trackers_get_the_numbers(tmp_path, monkeypatch):
    """accelerate's tracker of another package, which writes what it is told, and to the log as accelerate's do."""
    from accelerate import state, tracking

    monkeypatch.setattr(state.PartialState, "_shared_state", state.SharedDict())  # as in a process of its own
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
            tracking.logger.debug("Initialized")
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


@pytest.mark.parametrize(
    ("variables", "project", "name"),
    [({}, "my-run", "my-run"), ({"WANDB_PROJECT": "sst2", "WANDB_NAME": "first"}, "sst2", "first")],
)
def test_wandb_has_the_project_and_the_name_that_its_variables_say(variables, project, name, tmp_path, monkeypatch):
    from accelerate import state

    monkeypatch.setattr(state.PartialState, "_shared_state", state.SharedDict())
    told = {}
    run = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    config = SimpleNamespace(update=lambda *_, **__: None)
    wandb = SimpleNamespace(init=lambda **given: told.update(given) or run, config=config)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("modelcenter.training.output.trackers.find_spec", lambda name: shutil)
    for variable in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    trackers = Trackers(tmp_path / "my-run", ClassificationConfig(trackers=["wandb"]))
    trackers.log({"step": 3, "loss": 0.25})
    trackers.close()
    assert told == {"project": project, "name": name}


@pytest.fixture
def started(monkeypatch):
    """The arguments with which stand-ins for wandb and MLflow were started, and what they were told."""
    from accelerate import state

    monkeypatch.setattr(state.PartialState, "_shared_state", state.SharedDict())
    monkeypatch.setattr("modelcenter.training.output.trackers.find_spec", lambda name: shutil)
    for variable in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    told, known = [], []

    def new_run(given):
        run = given or f"run-{len(known)}"
        known.append(run)
        return run

    def init(**given):
        told.append({k: v for k, v in given.items() if k in ("id", "resume")})
        log = lambda values, step: told.append((step, values))  # noqa: E731
        return SimpleNamespace(id=new_run(given.get("id")), log=log, finish=lambda: None)

    def start_run(run_id, **_):
        told.append({} if run_id is None else {"run_id": run_id})
        if run_id is not None and run_id not in known:
            raise ValueError(f"Run {run_id!r} not found")
        return SimpleNamespace(info=SimpleNamespace(run_id=new_run(run_id)))

    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=1000)
    mlflow = SimpleNamespace(
        search_experiments=lambda **_: [SimpleNamespace(experiment_id="1")], start_run=start_run,
        log_params=lambda values: told.append(values["lr"]), utils=SimpleNamespace(validation=limits),
        log_metrics=lambda values, step: told.append((step, values)), end_run=lambda: None,
    )  # fmt: skip
    config = SimpleNamespace(update=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, config=config))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return SimpleNamespace(told=told, known=known)


def run_trackers(path, names, step=0, lr=0.5):
    trackers = Trackers(path, ClassificationConfig(trackers=names, lr=lr), step)
    trackers.log({"step": step + 1, "loss": 0.25})
    trackers.close()


def test_a_resumed_run_continues_its_runs_of_trackers(started, tmp_path):
    """And not those of another run; MLflow, which refuses to change the parameters of a run, gets them once."""
    run_trackers(tmp_path, ["wandb", "mlflow"])
    run_trackers(tmp_path, ["wandb", "mlflow"], step=7, lr=0.25)
    (tmp_path / "another").mkdir()
    run_trackers(tmp_path / "another", ["wandb"], step=7)
    assert started.told == [
        {}, {}, 0.5, (1, {"loss": 0.25}), (1, {"loss": 0.25}),
        {"id": "run-0", "resume": "allow"}, {"run_id": "run-1"}, (8, {"loss": 0.25}), (8, {"loss": 0.25}),
        {}, (8, {"loss": 0.25}),
    ]  # fmt: skip


def test_variables_name_the_run_that_a_tracker_continues(started, tmp_path, monkeypatch):
    run_trackers(tmp_path, ["wandb", "mlflow"])
    for variable in ("WANDB_RUN_ID", "MLFLOW_RUN_ID"):
        monkeypatch.setenv(variable, "mine")
    started.known.append("mine")
    run_trackers(tmp_path, ["wandb", "mlflow"], step=7)
    assert started.told[5:] == [{"resume": "allow"}, {"run_id": "mine"}, (8, {"loss": 0.25}), (8, {"loss": 0.25})]
    monkeypatch.setenv("WANDB_RESUME", "must")
    run_trackers(tmp_path, ["wandb"], step=9)
    assert started.told[9] == {}


def test_a_tracker_that_has_lost_its_run_begins_another(started, tmp_path, capsys):
    run_trackers(tmp_path, ["mlflow"])
    started.known.clear()  # another server
    run_trackers(tmp_path, ["mlflow"], step=7)
    assert started.told[3:] == [{"run_id": "run-0"}, {}, 0.5, (8, {"loss": 0.25})]
    says = "trackers: mlflow starts a new run, because it cannot continue the previous one: Run 'run-0' not found\n"
    assert capsys.readouterr().err == says
    (tmp_path / "tracking" / "runs.json").write_text("{")
    run_trackers(tmp_path, ["mlflow"], step=9)
    assert started.told[7] == {} and "runs.json cannot be read as JSON" in capsys.readouterr().err


def test_a_run_that_starts_anew_has_new_runs_of_trackers(tmp_path):
    """tensorboard hides the rows of later steps, which the stopped run wrote."""
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "runs.json").write_text('{"wandb": "run-0"}')
    assert continuing_options("wandb", tmp_path, 3) == {"id": "run-0", "resume": "allow"}
    assert continuing_options("tensorboard", tmp_path, 3) == {"purge_step": 4}
    clear_output(tmp_path)
    assert continuing_options("wandb", tmp_path, 0) is continuing_options("tensorboard", tmp_path, 0) is None


def test_the_record_of_a_resumed_run_continues_it(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("modelcenter.training.output.trackers.selected_trackers", lambda names: names)
    monkeypatch.setattr("modelcenter.training.output.trackers._start", lambda *arguments: given.append(arguments))
    Record(tmp_path, 9, True, 3, cfg=ClassificationConfig(trackers=["tensorboard"]))
    assert given[0][3] == {"purge_step": 4}


def test_a_tracker_that_cannot_start_ends_no_run(tmp_path, monkeypatch, capsys):
    def refused(*_):
        raise ConnectionError("no login")

    monkeypatch.setattr("modelcenter.training.output.trackers.selected_trackers", lambda names: names)
    monkeypatch.setattr("modelcenter.training.output.trackers._start", refused)
    record = Record(tmp_path, 3, True, cfg=ClassificationConfig(trackers=["wandb"]))
    record.close({"status": "finished"})
    assert (tmp_path / "summary.json").is_file()
    assert capsys.readouterr().err == "trackers: wandb gets no rows, because it could not be started: no login\n"


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
        "trackers: mlflow gets no more rows, because it failed: the server is away",
        "trackers: mlflow could not be closed: the server is away",
    ]
