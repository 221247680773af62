"""From flags to everything a run needs before its first step: task, model, tokenizer, and tokenized rows."""

from dataclasses import dataclass
from typing import Any

from engine.collectives import together
from modelcenter.data.examples import Examples
from modelcenter.models.base import Model
from modelcenter.training.checkpoints.resume import Continuation, find_continuation
from modelcenter.training.setup.launch import start_ranks
from modelcenter.training.setup.model import build_model, load_tokenizer
from modelcenter.training.setup.resolve import resolve_for_model, resolve_for_ranks
from modelcenter.training.setup.teacher import give_teacher, with_teachers_types
from modelcenter.training.tasks import TaskInfo
from modelcenter.training.tasks.base import Task
from modelcenter.training.trained import check_family, class_names


@dataclass(frozen=True)
class PreparedRun:
    """What a run needs besides its flags.

    Attributes:
        continuation: the run to resume from; None: a new run.
    """

    task: Task
    model: Model
    tokenizer: Any
    train_set: Examples
    eval_set: Examples | None
    continuation: Continuation | None


def prepare_run(cfg: Any, info: TaskInfo) -> PreparedRun:
    """Read the data, start the ranks, build the model and tokenize the rows. Collective.

    Args:
        cfg: the flags, which are resolved on the way (see resolve.py).

    Raises:
        ValueError: wrong flags, files or data.
    """
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
    # `together`: a row that is wrong on one node alone is an error on all of them.
    with with_teachers_types(tokenizer, teacher), together("preparing the rows", patient=True):
        train_set, eval_set = task.tokenize(tokenizer, cfg.max_length)
    return PreparedRun(task, model, tokenizer, train_set, eval_set, continuation)
