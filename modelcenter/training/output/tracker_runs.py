"""The ids that trackers give to a training run, by which a resumed run continues its curves."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelcenter._paths import write_whole
from modelcenter.hub.files.json_files import read_json
from modelcenter.training.output.json_text import json_text

FOLDER = "tracking"  # in output_dir, for the trackers' files; removed when a run starts over
_RUNS_FILE = "runs.json"  # in FOLDER: {tracker: id of its run}


@dataclass(frozen=True)
class _Kind:
    """How a tracker identifies its runs.

    argument: the argument of its start for the id of a run to continue. id_of: returns the id of the started run.
    options: further arguments for continuing a run, each with the environment variable by which users set it (empty:
    none).
    variable: the environment variable by which users set the id themselves.
    """

    argument: str
    id_of: Callable[[Any], str]
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    variable: str = ""


_KINDS = {  # for trackers that can continue runs
    "wandb": _Kind("id", lambda run: run.id, {"resume": ("allow", "WANDB_RESUME")}, "WANDB_RUN_ID"),
    "mlflow": _Kind("run_id", lambda run: run.info.run_id, variable="MLFLOW_RUN_ID"),
    "trackio": _Kind("name", lambda run: run.name, {"resume": ("allow", "")}),
    "comet_ml": _Kind("experiment_key", lambda experiment: experiment.get_key(), variable="COMET_EXPERIMENT_KEY"),
    "clearml": _Kind("reuse_last_task_id", lambda task: task.id, {"continue_last_task": (0, "")}),
    "dvclive": _Kind("dir", lambda live: live.dir, {"resume": (True, "DVCLIVE_RESUME")}),
    "swanlab": _Kind("id", lambda run: run.id, {"resume": ("allow", "SWANLAB_RESUME")}, "SWANLAB_RUN_ID"),
}


def continuing_options(name: str, folder: Path, step: int) -> dict[str, Any] | None:
    """The arguments with which a tracker continues its run of an output_dir; None: there is no such run, or it cannot.

    Args:
        step: the step that the run resumes from.

    Raises:
        ValueError: the file of ids cannot be read.
    """
    if name == "tensorboard":  # the same folder; rows of later steps, which the stopped run wrote, are hidden
        return {"purge_step": step + 1} if step else None
    kind, path = _KINDS.get(name), folder / FOLDER / _RUNS_FILE
    run = read_json(path).get(name) if kind is not None and path.is_file() else None
    if kind is None or not isinstance(run, str):
        return None
    options = {key: value for key, (value, variable) in kind.options.items() if variable not in os.environ}
    return options if kind.variable in os.environ else {**options, kind.argument: run}


def note_run(name: str, folder: Path, tracker: Any) -> None:
    """Save the id of the run that a tracker of accelerate has started.

    Raises:
        Exception: the id is not where it is expected, or the file cannot be written.
    """
    kind, path = _KINDS.get(name), folder / FOLDER / _RUNS_FILE
    if kind is None:
        return
    path.parent.mkdir(exist_ok=True)
    runs = read_json(path) if path.is_file() else {}
    write_whole(path, (json_text({**runs, name: kind.id_of(tracker.tracker)}, indent=2) + "\n").encode())
