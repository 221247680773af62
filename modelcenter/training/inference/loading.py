"""The model and the tokenizer that the flags of a verb name."""

from typing import Any

import engine
import modelcenter
from modelcenter.models.base import Model
from modelcenter.training.setup.resolve import resolve_max_length, resolve_precision, set_matmul_precision
from modelcenter.training.trained import TrainedModel


def start_ranks(cfg: Any) -> None:
    """Meet the other ranks, if a launcher started some, and multiply as the flags say. Collective."""
    engine.init_distributed(zero_level=cfg.zero)
    set_matmul_precision(cfg.matmul_precision)


def load_model(
    cfg: Any, trained: TrainedModel, source: str | None = None, task: str | None = None, **options: Any
) -> Model:
    """The model on all ranks. cfg: flags of inference. source: what to load in its place. task, options: of
    modelcenter.from_pretrained."""
    options = {"policy": load_policy(cfg), "revision": cfg.revision, **options}
    return modelcenter.from_pretrained(source or trained.source, task, **options)


def load_policy(cfg: Any) -> engine.Policy:
    """How the flags say that a model is sharded."""
    return engine.Policy(zero_level=cfg.zero, precision=resolve_precision(cfg.precision))


def load_tokenizer(cfg: Any, trained: TrainedModel) -> Any:
    """The tokenizer that the flags name, else the model's."""
    revision = {"revision": cfg.revision} if cfg.revision and cfg.tokenizer is None else {}
    return modelcenter.AutoTokenizer.from_pretrained(cfg.tokenizer or trained.source, **revision)


def max_length_of(trained: TrainedModel, model: Model, tokenizer: Any, requested: int | None) -> int:
    """Tokens a row may have: as many as requested, else as in the run that trained the model, else as
    resolve_max_length. Raises ValueError: see there."""
    of_run = None if trained.run is None else trained.run.max_length
    return resolve_max_length(model, tokenizer, requested or of_run)
