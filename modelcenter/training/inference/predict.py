"""predict and evaluate: a trained model on new rows, for every task and on any number of ranks."""

import dataclasses
import errno
import os
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TextIO

import engine
import modelcenter
from engine.checkpoint import together
from modelcenter.data import sources
from modelcenter.data.token_files import is_tokens
from modelcenter.models.base import Model
from modelcenter.training.config import EvaluateConfig, PredictConfig
from modelcenter.training.config.use import SearchFlags
from modelcenter.training.output.json_text import json_text
from modelcenter.training.setup.model import omit_unused_token_types
from modelcenter.training.setup.resolve import resolve_max_length, resolve_precision
from modelcenter.training.tasks import TASKS, TaskInfo
from modelcenter.training.tasks.base import Examples, Task
from modelcenter.training.trained import Trained


def run_predict(cfg: PredictConfig) -> None:
    """Write a JSON line for each row, in order; what it holds is the task's (see Task.predict)."""
    check_output(cfg.output)
    task, trained = _read(cfg, labelled=False)
    model, tokenizer, examples = _load(cfg, task, trained)
    said = task.predict(model, tokenizer, examples, cfg)
    if engine.rank() == 0:
        written = write_lines(cfg.output, map(json_text, said))
        if cfg.output is not None:
            print(f"{cfg.output}: {written:,} rows", file=sys.stderr)
    engine.synchronize()  # no rank leaves before the result is written


def run_evaluate(cfg: EvaluateConfig) -> dict[str, float | None]:
    """Print the loss and the metrics of a model on labelled rows, and write them if there is an output."""
    check_output(cfg.output)
    task, trained = _read(cfg, labelled=True)
    model, _, examples = _load(cfg, task, trained)
    found = task.evaluate(model, examples, cfg.batch_size)
    rows = task.count(examples)
    if engine.rank() == 0:
        text = json_text({"rows": rows, **found})
        if cfg.output is not None:
            write_lines(cfg.output, [text])
        lines = [f"{name:<10} {'undefined' if value is None else f'{value:.4f}'}" for name, value in found.items()]
        print(text if cfg.json else "\n".join([f"{'rows':<10} {rows}", *lines]))
    engine.synchronize()
    return found


def _read(cfg: PredictConfig, labelled: bool) -> tuple[Task, Trained]:
    cfg.require("run", "data")
    trained = Trained.find(cfg.run or "")
    if not any(map(is_tokens, cfg.data or [])):
        sources.find(cfg.data or [], cfg.data_config)  # data that are not there are told before the model is looked for
    info = trained.task_info(cfg.revision)
    cfg.check_task(info.flags(), search_of(info, labelled))
    task = info.load()
    return task.to_use(cfg, trained.run, task.read(cfg, trained.run, labelled), labelled), trained


def search_of(info: TaskInfo, labelled: bool) -> Collection[str]:
    """The flags of the search that a task has a use for. One that is judged by its loss alone writes nothing then."""
    if info.heads[0] == "masked-lm":
        return () if labelled else ("top_k",)
    writes = info is TASKS["seq2seq"] if labelled else info.heads[0] in ("causal-lm", "seq2seq-lm")
    return [field.name for field in dataclasses.fields(SearchFlags)] if writes else ()


def _load(cfg: PredictConfig, task: Task, trained: Trained) -> tuple[Model, Any, Examples]:
    """The model on all ranks, its tokenizer, and the rows as it takes them."""
    engine.init_distributed(zero_level=cfg.zero)
    policy = engine.Policy(zero_level=cfg.zero, precision=resolve_precision(cfg.precision))
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
    omit_unused_token_types(tokenizer, model)
    length = resolve_max_length(model, tokenizer, cfg.max_length or (trained.run and trained.run.max_length))
    with together("preparing the rows"):
        return model, tokenizer, task.rows_for(model, tokenizer, length)


def check_output(path: str | None) -> None:
    """Raise OSError before the work is done if its result could not be written."""
    if path is not None and int(os.environ.get("RANK") or 0) == 0:
        target = _target(path)
        if target.is_dir():
            raise OSError(f"output: {path} is a directory; give the name of a file, such as {Path(path) / 'out.jsonl'}")
        try:
            if _is_stream(target):
                if not os.access(target, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                return
            with tempfile.TemporaryFile(dir=target.parent):
                pass
        except OSError as error:
            raise OSError(f"output: cannot write {path}: {error.strerror}") from None


def write_lines(path: str | None, lines: Iterable[str]) -> int:
    """Write lines to a file, which is there when it is whole, or to standard output; returns how many they were.

    A device or a pipe (/dev/null, /dev/stderr, the shell's >(gzip > x)) is written to as it is.
    """
    if path is None:
        return _write(sys.stdout, lines)
    target = _target(path)
    if _is_stream(target):
        with target.open("w", encoding="utf-8") as file:
            return _write(file, lines)
    work = target.with_name(f".{target.name}.writing")
    try:
        with work.open("w", encoding="utf-8") as file:
            written = _write(file, lines)
        work.rename(target)
    finally:
        work.unlink(missing_ok=True)
    return written


def _target(path: str) -> Path:
    """The file that a path means: where it is a link, what that leads to, so that the link stays."""
    given = Path(path).expanduser().absolute()
    return given if _is_stream(given) else Path(os.path.realpath(given))


def _is_stream(path: Path) -> bool:
    """Whether it is there and is no file that another could take the place of."""
    return path.exists() and not path.is_file()


def _write(file: TextIO, lines: Iterable[str]) -> int:
    return sum(bool(file.write(line + "\n")) for line in lines)
