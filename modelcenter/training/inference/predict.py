"""predict and evaluate: using a trained model on new rows, for every task and on any number of ranks."""

import dataclasses
import functools
import logging
import sys
from collections.abc import Collection
from typing import Any

import engine
from engine.collectives import together
from modelcenter.data import sources
from modelcenter.data.examples import Examples
from modelcenter.data.token_files import is_tokens
from modelcenter.models.base import Model
from modelcenter.training.config import EvaluateConfig, PredictConfig
from modelcenter.training.config.inference import SearchFlags
from modelcenter.training.config.seq2seq import ONE_BEAM
from modelcenter.training.inference.loading import load_model, load_policy, load_tokenizer, max_length_of, start_ranks
from modelcenter.training.inference.output_file import check_output, write_lines, write_rows
from modelcenter.training.output.json_text import json_text
from modelcenter.training.setup.model import omit_unused_token_types
from modelcenter.training.tasks import TASKS, TaskInfo
from modelcenter.training.tasks.base import Task
from modelcenter.training.trained import TrainedModel

log = logging.getLogger("modelcenter")


def run_predict(cfg: PredictConfig) -> None:
    """Write the prediction for each row, in order; its fields depend on the task (see Task.predict)."""
    check_output(cfg.output)
    task, trained = _read_task(cfg, labelled=False)
    model, tokenizer, examples = _prepare(cfg, task, trained)
    predictions = task.predict(model, tokenizer, examples, cfg)
    if engine.rank() == 0:
        count = write_rows(cfg.output, predictions)
        if cfg.output is not None:
            print(f"{cfg.output}: {count:,} rows", file=sys.stderr)
    engine.synchronize()  # no rank leaves before the result is written


def run_evaluate(cfg: EvaluateConfig) -> dict[str, float | None]:
    """Print the loss and the metrics of a model on labelled rows, and write them if there is an output."""
    check_output(cfg.output, (".json", ".jsonl", ".ndjson"))
    task, trained = _read_task(cfg, labelled=True)
    model, _, examples = _prepare(cfg, task, trained)
    metrics = task.evaluate(model, examples, cfg.batch_size)
    rows = task.count_rows(examples)
    if engine.rank() == 0:
        text = json_text({"rows": rows, **metrics})
        if cfg.output is not None:
            write_lines(cfg.output, [text])
        shown = {"rows": rows} | {k: "undefined" if v is None else f"{v:.4f}" for k, v in metrics.items()}
        width = max(map(len, shown))
        print(text if cfg.json else "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items()))
    engine.synchronize()
    return metrics


def _read_task(cfg: PredictConfig, labelled: bool) -> tuple[Task, TrainedModel]:
    """The task of the model with the rows of the data."""
    cfg.require("run", "data")
    trained = TrainedModel.find(cfg.run or "")
    if not any(map(is_tokens, cfg.data or [])):
        sources.find(cfg.data or [], cfg.data_config)  # missing data are an error before the model is looked for
    info = trained.task_info(cfg.revision, cfg.task)
    cfg.check_task(info.flags(), search_flags(info, labelled))
    one_beam = cfg.search(trained.run)["num_beams"] == 1
    cfg.refuse_idle("length_penalty", one_beam and cfg.length_penalty != 1, ONE_BEAM.remedy)
    for name in ("early_stopping", "renormalize_logits"):
        cfg.refuse_idle(name, one_beam, ONE_BEAM.remedy)
    task = info.load()
    return task.for_inference(cfg, trained.run, task.read_data(cfg, trained.run, labelled), labelled), trained


def search_flags(info: TaskInfo, labelled: bool) -> Collection[str]:
    """The search flags that a task uses. A task that is evaluated only by its loss generates no texts then."""
    if info.heads[0] in ("masked-lm", "sparse-embedding"):
        return () if labelled else ("top_k",)
    writes = info is TASKS["seq2seq"] if labelled else info.heads[0] in ("causal-lm", "seq2seq-lm")
    return [field.name for field in dataclasses.fields(SearchFlags)] if writes else ()


def _prepare(cfg: PredictConfig, task: Task, trained: TrainedModel) -> tuple[Model, Any, Examples]:
    """The model on all ranks, its tokenizer, and the rows as examples."""
    start_ranks(cfg)
    load = functools.partial(load_model, cfg, trained, dtype="float32")
    model = task.trained_model(trained.source, load, load_policy(cfg))
    report = getattr(model, "load_report", None)
    if model.task not in TASKS[task.name].heads or (report is not None and report.initialised):
        raise ValueError(
            f"{cfg.run}: got a model for {model.task}, expected one that was trained for {task.head}; `modelcenter "
            f"{TASKS[task.name].verb} {task.name}` trains it"
        )
    tokenizer = load_tokenizer(cfg, trained)
    omit_unused_token_types(tokenizer, model)
    max_length = max_length_of(trained, model, tokenizer, cfg.max_length)
    with together("preparing the rows", patient=True):
        examples = task.inference_examples(model, tokenizer, max_length)
    cut = getattr(examples, "truncated", 0)  # some tasks have lists of prompts, which are never truncated
    if cut and engine.rank() == 0:
        log.warning("%s: %d texts truncated at %s", examples.name, cut, task.length_limit(max_length))
    return model, tokenizer, examples
