"""Resolves flags that depend on the machine, the ranks, the model or the rows: what `auto` and none mean for a run.

A run resolves each flag as soon as it knows what the flag depends on, in the order of the first four functions below.
Besides, the task sets its own flags, and trained.resolve_model_names those that name models. config.yaml has the
results. The functions that these call return values and change no flags.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

import engine
from engine.ops import multiplies_in_bf16
from modelcenter.data.examples import Examples
from modelcenter.models.base import Model
from modelcenter.training.checkpoints.resume import Continuation
from modelcenter.training.config import TrainConfig
from modelcenter.training.distillation.teacher import Teacher
from modelcenter.training.setup.automatic_batch_size import largest_batch_sizes
from modelcenter.training.setup.batch_sizes import continued_batch_sizes, step_sizes

log = logging.getLogger(__name__)


def resolve_for_ranks(cfg: TrainConfig, continuation: Continuation | None) -> None:
    """Resolve the precision, from the device, and the sizes of a step, from the number of ranks and the run that is
    resumed. With `--batch_size auto`, `resolve_automatic_batch_size` resolves the sizes later.

    Raises:
        ValueError: the sizes contradict each other, or the ranks cannot share them.
    """
    cfg.precision = resolve_precision(cfg.precision)
    if continuation is not None:
        _set_flags(cfg, continued_batch_sizes(cfg, continuation, engine.data_size()))
    if cfg.batch_tokens is not None or cfg.batch_size != "auto":
        _set_flags(cfg, step_sizes(cfg, engine.data_size()))


def resolve_for_model(cfg: TrainConfig, model: Model, tokenizer: Any, teacher: Teacher | None = None) -> None:
    """Resolve max_length, from the model, the tokenizer and the teacher.

    Raises:
        ValueError: see resolve_max_length; or the teacher has fewer positions than were requested.
    """
    requested = cfg.max_length
    cfg.max_length = resolve_max_length(model, tokenizer, requested)
    positions = None if teacher is None else teacher.model.config.max_tokens
    if positions is not None and positions < cfg.max_length:
        if requested is not None:
            raise ValueError(f"max_length: got {requested}, but the position table of the teacher has {positions}")
        cfg.max_length = positions


def resolve_eval_batch_size(cfg: TrainConfig, *examples: Any) -> None:
    """With batch_tokens, resolve the number of rows of an evaluation batch: as many of the longest rows as have at most
    twice the tokens of a microbatch.

    Args:
        examples: what is evaluated. DPO's reference also evaluates the training rows. Streams are not evaluated.
    """
    lengths = [int(rows.lengths.max()) for rows in examples if hasattr(rows, "lengths")]
    if cfg.batch_tokens is not None and cfg.eval_batch_size is None and lengths:
        cfg.eval_batch_size = max(1, 2 * cfg.batch_tokens // max(lengths))


def resolve_automatic_batch_size(cfg: TrainConfig, task: Any, model: Model, examples: Examples) -> None:
    """Resolve `--batch_size auto` and the sizes that follow from it. On a GPU, runs steps to measure them. Collective.

    Raises:
        ValueError: see largest_batch_sizes.
    """
    if cfg.batch_size == "auto":
        _set_flags(cfg, largest_batch_sizes(cfg, task, model, examples))
        _set_flags(cfg, step_sizes(cfg, engine.data_size()))


def _set_flags(cfg: TrainConfig, values: Mapping[str, int | None]) -> None:
    for name, value in values.items():
        setattr(cfg, name, value)


def resolve_precision(precision: str) -> str:
    """What "auto" means on this machine; any other value is returned as it is."""
    if precision != "auto":
        return precision
    native = engine.device().type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp32"


def set_matmul_precision(precision: str) -> None:
    """Set how this process multiplies fp32 matrices. Warns if "medium" changes nothing on this CPU."""
    torch.set_float32_matmul_precision(precision)
    if precision == "medium" and engine.device().type == "cpu" and engine.rank() == 0 and not multiplies_in_bf16():
        log.warning(
            "matmul_precision: medium changes nothing here, because this CPU does not multiply bf16 faster than fp32"
        )


def resolve_max_length(model: Model, tokenizer: Any, requested: int | None) -> int:
    """The maximum tokens of a row: as many as requested, else as many as both model and tokenizer support.

    Raises:
        ValueError: the model's position table has fewer than were requested, or they are too few for any text.
    """
    of_texts = (model.config.embedding.max_length, model.config.sparse_embedding.max_length)
    most = min(tokenizer.model_max_length, *(limit or 2**31 for limit in (model.config.max_tokens, *of_texts)))
    if requested is None:
        return most if most < 2**31 else 512
    positions = model.config.max_tokens or requested
    if requested > positions:
        raise ValueError(f"max_length: got {requested}, but the position table of this model has {positions}")
    special = tokenizer.num_special_tokens_to_add(pair=True)
    if requested <= special:
        raise ValueError(f"max_length: got {requested}, expected more than the {special} special tokens of a row")
    return requested
