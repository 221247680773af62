"""What every script of a task does, from its command line to the end of its run.

Imports no torch before the flags are read, so that --help and mistakes in the flags take no time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import engine
from modelcenter.registry import nearest
from modelcenter.training.tasks import TASKS, TaskInfo
from modelcenter.training.trained import check_family, class_names, resolve_model_names

if TYPE_CHECKING:
    from modelcenter.data.examples import Examples
    from modelcenter.models.base import Model
    from modelcenter.training.checkpoints.resume import Continuation
    from modelcenter.training.tasks.base import Task


def run_task(name: str, argv: Sequence[str] | None, prog: str | None = None, about: str | None = None) -> None:
    """Train a model for a task, or show what that would be (--dry_run).

    Args:
        name: in TASKS. argv: words of the command line; None: those of this process. prog, about: for --help.

    Raises:
        ValueError: wrong flags, files or data.
    """
    began = time.monotonic()
    _run(TASKS[name], TASKS[name].flags().from_args(sys.argv[1:] if argv is None else argv, prog, about), began)


def run(task: str, **flags: Any) -> dict[str, Any]:
    """Train a model from Python, as `modelcenter finetune TASK` and `pretrain TASK` do. Every rank calls it.

        summary = mc.training.run("classification", model="bert-base-uncased", train_data="train.csv", output_dir="run")

    Args:
        task: classification, lm, ..., mlm; `pretrain-lm` is that of `pretrain lm`. flags: those of the command line, by
            any of their names; a list where that takes several words, a dict where it takes KEY=VALUE. config: a YAML
            file of flags, which the others override.

    Returns:
        The contents of summary.json; {} for a dry run.

    Raises:
        ValueError: wrong flags, files or data. As `train` of loop.py besides.
    """
    began = time.monotonic()
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}, expected one of {', '.join(TASKS)}.{nearest(task, TASKS)}")
    return _run(TASKS[task], TASKS[task].flags().from_keywords(flags), began)


def _run(info: TaskInfo, cfg: Any, began: float) -> dict[str, Any]:
    """Train as the flags say. began: from when max_time counts. Returns the contents of summary.json; {}: a dry run."""
    cfg.require("model", "train_data", *(() if cfg.dry_run else ("output_dir",)))
    resolve_model_names(cfg)

    engine.memory.prepare_torch()  # before it is imported
    with ExitStack() as claim:
        with engine.memory.left_uncollected():
            from modelcenter.training.dry_run import dry_run
            from modelcenter.training.loop import train
            from modelcenter.training.setup.launch import claim_output

            claim.enter_context(claim_output(cfg))  # it can be written, holds no finished run, and no other run writes
            made = _prepare(cfg, info)
        run_of = made.task, made.model, made.tokenizer, made.train_set, made.eval_set
        if cfg.dry_run:
            dry_run(cfg, *run_of)
            return {}
        return train(cfg, *run_of, made.continuation, began)


@dataclass(frozen=True)
class _Prepared:
    """What a run needs besides its flags. continuation: of the run that it goes on from, None for a new one."""

    task: Task
    model: Model
    tokenizer: Any
    train_set: Examples
    eval_set: Examples | None
    continuation: Continuation | None


def _prepare(cfg: Any, info: TaskInfo) -> _Prepared:
    """Read the data, start the ranks, build the model and tokenize the rows. Collective."""
    from engine.collectives import together
    from modelcenter.training.checkpoints.resume import find_continuation
    from modelcenter.training.setup.launch import start_ranks
    from modelcenter.training.setup.model import build_model, load_tokenizer
    from modelcenter.training.setup.resolve import resolve_for_model, resolve_for_ranks
    from modelcenter.training.setup.teacher import give_teacher, with_teachers_types

    task = info.load().from_flags(cfg)  # reads or opens the data, finds its columns and labels
    start_ranks(cfg)
    continuation = find_continuation(cfg)
    resolve_for_ranks(cfg, continuation)
    config = check_family(cfg, task.head)
    if not cfg.from_scratch:
        task.adopt_label_order(class_names(config))
    tokenizer = load_tokenizer(cfg)
    task.on_tokenizer_loaded(tokenizer)
    model = build_model(cfg, task, tokenizer)
    teacher = give_teacher(cfg, task, model, tokenizer, continuation is not None)
    resolve_for_model(cfg, model, tokenizer, teacher)
    types = with_teachers_types(tokenizer, teacher)
    with (
        types,
        together("preparing the rows", patient=True),
    ):  # a row that is wrong on one node alone is an error on all
        train_set, eval_set = task.tokenize(tokenizer, cfg.max_length)
    return _Prepared(task, model, tokenizer, train_set, eval_set, continuation)
