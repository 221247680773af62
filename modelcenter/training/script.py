"""A run of a task, from its command line (or a call from Python) to its end.

torch is imported only after the flags are read, so that --help and errors in flags come at once.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import engine
from modelcenter.registry import nearest
from modelcenter.training.tasks import TASKS, TaskInfo
from modelcenter.training.trained import resolve_model_names


def run_task(name: str, argv: Sequence[str] | None, prog: str | None = None, about: str | None = None) -> None:
    """Train a model for a task, or show the plan of the run (--dry_run).

    Args:
        name: a key of TASKS. argv: the words of the command line; None: those of this process. prog, about: for --help.

    Raises:
        ValueError: wrong flags, files or data.
    """
    began = time.monotonic()
    _run(TASKS[name], TASKS[name].flags().from_args(sys.argv[1:] if argv is None else argv, prog, about), began)


def run(task: str, **flags: Any) -> dict[str, Any]:
    """Train a model from Python, as `modelcenter finetune TASK` and `pretrain TASK` do. Every rank calls it.

        summary = mc.training.run("classification", model="bert-base-uncased", train_data="train.csv", output_dir="run")

    Args:
        task: classification, lm, ..., mlm; `pretrain-lm` for `pretrain lm`. flags: those of the command line, by any of
            their names; a list for several words, a dict for KEY=VALUE. config: a YAML file of flags, which the other
            flags override.

    Returns:
        The contents of summary.json; {} for a dry run.

    Raises:
        ValueError: wrong flags, files or data. Also what `train` of loop.py raises.
    """
    began = time.monotonic()
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}, expected one of {', '.join(TASKS)}.{nearest(task, TASKS)}")
    return _run(TASKS[task], TASKS[task].flags().from_keywords(flags), began)


def _run(info: TaskInfo, cfg: Any, began: float) -> dict[str, Any]:
    """Train as the flags say. `began` is when max_time starts to count. Returns the contents of summary.json, or {} for
    a dry run."""
    cfg.require("model", "train_data", *(() if cfg.dry_run else ("output_dir",)))
    resolve_model_names(cfg)

    engine.memory.prepare_torch()  # before it is imported
    with ExitStack() as claim:
        with engine.memory.left_uncollected():
            from modelcenter.training.dry_run import dry_run
            from modelcenter.training.loop import train
            from modelcenter.training.setup.launch import claim_output
            from modelcenter.training.setup.prepare import prepare_run

            claim.enter_context(claim_output(cfg))
            prepared = prepare_run(cfg, info)
        if cfg.dry_run:
            dry_run(cfg, prepared)
            return {}
        return train(cfg, prepared, began)
