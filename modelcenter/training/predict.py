"""predict and evaluate: a trained model on new rows, for every task and on any number of ranks."""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
import modelcenter
from modelcenter import registry
from modelcenter.data import sources
from modelcenter.data.token_files import is_tokens
from modelcenter.hub.download import HubOptions
from modelcenter.hub.resolve import resolve
from modelcenter.models.base import Model
from modelcenter.training import setup
from modelcenter.training.config import PredictConfig, TrainConfig
from modelcenter.training.tasks import TASKS, TaskInfo, task_of_head
from modelcenter.training.tasks.base import Examples, Task


@dataclass
class Trained:
    """A model to use: where its files are, and the task and flags of the run that made it, if a run did."""

    source: str
    task: str | None = None
    run: TrainConfig | None = None

    @classmethod
    def find(cls, name: str) -> "Trained":
        """A run's folder, else anything that modelcenter.from_pretrained takes.

        Raises:
            ValueError: the folder is of a run that left no model.
        """
        folder = Path(name).expanduser()
        if not (folder / "config.yaml").is_file():
            return cls(name)
        if not (folder / "model" / "config.json").is_file():
            last = folder / "checkpoints" / "last"
            instead = f"; its newest checkpoint is {last}" if last.exists() else ""
            raise ValueError(
                f"{folder} is a run without a model: it did not finish. The command that started it goes on{instead}"
            )
        task = _task_of_run(folder / "config.yaml")
        return cls(str(folder / "model"), task, TASKS[task].flags().from_yaml(folder / "config.yaml"))

    def task_info(self, revision: str | None = None) -> TaskInfo:
        """The task whose rows the model takes: the run's, else the one that the head of the checkpoint is for.

        Raises:
            ValueError: the checkpoint names no head that a task is for.
        """
        if self.task is not None:
            return TASKS[self.task]
        found = resolve(self.source, HubOptions(revision), weights=False)
        head = registry.get(found.config["model_type"]).arch_map().declared_task(found.config.get("architectures"))
        task = task_of_head(head or "base")
        if task is None:
            heads = ", ".join(sorted({head for info in TASKS.values() for head in info.heads}))
            raise ValueError(
                f"{self.source}: a model for {head or 'base'}, expected one that was trained for {heads}; "
                "`modelcenter finetune TASK` trains it"
            )
        return TASKS[task]


def run_predict(cfg: PredictConfig) -> None:
    """Write a JSON line for each row, in order; what it holds is the task's (see Task.predict)."""
    check_output(cfg.output)
    task, trained = _read(cfg, labelled=False)
    model, tokenizer, examples = _load(cfg, task, trained)
    said = task.predict(model, tokenizer, examples, cfg)
    if engine.rank() == 0:
        write_lines(cfg.output, (json.dumps(row, ensure_ascii=False) for row in said))
    engine.synchronize()  # no rank leaves before the result is written


def run_evaluate(cfg: PredictConfig, as_json: bool = False) -> dict[str, float | None]:
    """Print the loss and the metrics of a model on labelled rows, and write them if there is an output."""
    check_output(cfg.output)
    task, trained = _read(cfg, labelled=True)
    model, _, examples = _load(cfg, task, trained)
    found = task.evaluate(model, examples, cfg.batch_size)
    rows = task.count(examples)
    if engine.rank() == 0:
        text = json.dumps({"rows": rows, **found})
        if cfg.output is not None:
            write_lines(cfg.output, [text])
        lines = [f"{name:<10} {'undefined' if value is None else f'{value:.4f}'}" for name, value in found.items()]
        print(text if as_json else "\n".join([f"{'rows':<10} {rows}", *lines]))
    engine.synchronize()
    return found


def _task_of_run(path: Path) -> str:
    import yaml

    task = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("task", "classification")
    if task not in TASKS:
        raise ValueError(f"{path}: unknown task {task!r}; tasks: {', '.join(TASKS)}")
    return task


def _read(cfg: PredictConfig, labelled: bool) -> tuple[Task, Trained]:
    cfg.require("run", "data")
    trained = Trained.find(cfg.run or "")
    if not any(map(is_tokens, cfg.data or [])):
        sources.find(cfg.data or [], cfg.data_config)  # data that are not there are told before the model is looked for
    task = trained.task_info(cfg.revision).load()
    return task.to_use(cfg, trained.run, task.read(cfg, trained.run, labelled), labelled), trained


def _load(cfg: PredictConfig, task: Task, trained: Trained) -> tuple[Model, Any, Examples]:
    """The model on all ranks, its tokenizer, and the rows as it takes them."""
    engine.init_distributed(zero_level=cfg.zero)
    policy = engine.Policy(zero_level=cfg.zero, precision=setup.resolve_precision(cfg.precision))
    model = modelcenter.from_pretrained(trained.source, None, revision=cfg.revision, dtype="float32", policy=policy)
    fresh = getattr(model, "load_report", None)
    if model.task not in TASKS[task.name].heads or (fresh is not None and fresh.initialised):
        raise ValueError(
            f"{cfg.run}: a model for {model.task}, expected one that was trained for {task.head}; "
            f"`modelcenter {TASKS[task.name].verb} {task.name}` trains it"
        )
    name = cfg.tokenizer or trained.source
    revision = {"revision": cfg.revision} if cfg.revision and cfg.tokenizer is None else {}
    tokenizer = modelcenter.AutoTokenizer.from_pretrained(name, **revision)
    length = setup.max_length(model, tokenizer, cfg.max_length or (trained.run and trained.run.max_length))
    return model, tokenizer, task.rows_for(model, tokenizer, length)


def check_output(path: str | None) -> None:
    """Raise OSError before the work is done if its result could not be written."""
    if path is not None and int(os.environ.get("RANK") or 0) == 0:
        try:
            with tempfile.TemporaryFile(dir=Path(path).expanduser().absolute().parent):
                pass
        except OSError as error:
            raise OSError(f"output: cannot write {path}: {error.strerror}") from None


def write_lines(path: str | None, lines: Iterable[str]) -> None:
    if path is None:
        for line in lines:
            sys.stdout.write(line + "\n")
        return
    target = Path(path).expanduser()
    work = target.with_name(f".{target.name}.writing")
    with work.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    work.rename(target)
