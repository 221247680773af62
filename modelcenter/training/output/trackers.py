"""The experiment trackers that accelerate supports, which get the numbers of metrics.jsonl."""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modelcenter.registry import nearest
from modelcenter.training.config import TrainConfig
from modelcenter.training.output.tracker_runs import FOLDER, continuing_options, note_run

# accelerate's name -> the package it needs
TRACKERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "comet_ml": "comet_ml",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "aim": "aim",
    "swanlab": "swanlab",
}


def selected_trackers(requested: list[str] | None) -> list[str]:
    """The names of the trackers of --trackers; None: tensorboard, if it is installed.

    Raises:
        ValueError: a tracker is unknown, or its package is not installed.
    """
    if requested is None:
        return ["tensorboard"] if find_spec("tensorboard") is not None and find_spec("accelerate") is not None else []
    names = [name.lower() for name in requested if name.lower() != "no"]
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(TRACKERS)
            raise ValueError(f"trackers: got {name!r}, expected some of {known}, or no.{nearest(name, TRACKERS)}")
        for package in ("accelerate", TRACKERS[name]):
            if find_spec(package) is None:
                raise ValueError(f"trackers: {name} needs {package}, which is not installed: pip install {package}")
    return names


class Trackers:
    """The trackers of a run, on its writing rank."""

    def __init__(self, path: Path | None, cfg: TrainConfig | None = None, step: int = 0):
        """step: the step that the run resumes from; trackers continue their runs of this output_dir."""
        self._trackers: list[Any] = []
        for name in [] if path is None or cfg is None else selected_trackers(cfg.trackers):
            assert path is not None and cfg is not None
            try:
                self._trackers.append(_continue_or_start(name, path, cfg, step))
            except Exception as error:  # see log
                print(f"trackers: {name} gets no rows, because it could not be started: {error}", file=sys.stderr)

    def log(self, row: dict[str, Any]) -> None:
        """Send the numbers of a row of metrics.jsonl."""
        values = {name: v for name, v in row.items() if isinstance(v, (int, float)) and name != "step"}
        for tracker in list(self._trackers):
            try:
                tracker.log(values, step=row["step"])
            except Exception as error:  # any error of a server or library: a failing tracker must not end the run
                self._trackers.remove(tracker)
                print(f"trackers: {tracker.name} gets no more rows, because it failed: {error}", file=sys.stderr)

    def close(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.finish()
            except Exception as error:
                print(f"trackers: {tracker.name} could not be closed: {error}", file=sys.stderr)
        self._trackers = []


def _continue_or_start(name: str, path: Path, cfg: TrainConfig, step: int) -> Any:
    """Let a tracker continue its run of this output_dir; if there is none, or it cannot, start a new one."""
    try:
        options = continuing_options(name, path, step)
        if options is not None:
            return _start(name, path, cfg, options)
    except Exception as error:  # such as a server that has lost the run
        print(
            f"trackers: {name} starts a new run, because it cannot continue the previous one: {error}", file=sys.stderr
        )
    return _start(name, path, cfg)


def _start(name: str, path: Path, cfg: TrainConfig, continuing: Mapping[str, Any] | None = None) -> Any:
    """continuing: the arguments for continuing a run."""
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # accelerate's trackers write to its log, which raises an error before this; not collective
    kind = LOGGER_TYPE_TO_CLASS[name]
    project = run = path.absolute().name
    options = dict(continuing or {})
    if kind.requires_logging_directory:
        (path / FOLDER).mkdir(exist_ok=True)
        options["logging_dir"] = str(path / FOLDER)
    if name == "wandb":  # it prefers arguments to its environment variables, and accelerate passes the project
        project, options["name"] = os.environ.get("WANDB_PROJECT", run), os.environ.get("WANDB_NAME", run)
    tracker = kind(project, **options)
    tracker.main_process_only = False  # this rank writes, whatever rank accelerate takes it for
    tracker.start()
    # TensorBoard's table of hyper-parameters would add a second run; MLflow does not let those of a run change.
    if name != "tensorboard" and not (name == "mlflow" and continuing is not None):
        flags = cfg.to_dict().items()
        tracker.store_init_configuration({k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in flags})
    try:
        note_run(name, path, tracker)
    except Exception as error:  # such as a version that names its runs differently, or a full disk
        print(f"trackers: if this run is resumed, {name} will start a new one: {error}", file=sys.stderr)
    return tracker
