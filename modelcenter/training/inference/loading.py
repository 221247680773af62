"""Loading the model and the tokenizer that the flags of a verb name."""

from typing import Any

import engine
import modelcenter
from modelcenter.models.base import Model
from modelcenter.training.setup.resolve import resolve_max_length, resolve_precision, set_matmul_precision
from modelcenter.training.trained import TrainedModel


def start_ranks(cfg: Any) -> None:
    """Initialise the process group, if a launcher started several ranks, and the precision of matrix products that the
    flags set. Collective."""
    engine.init_distributed(zero_level=cfg.zero)
    set_matmul_precision(cfg.matmul_precision)


def load_model(
    cfg: Any, trained: TrainedModel, source: str | None = None, task: str | None = None, **options: Any
) -> Model:
    """The model on all ranks. cfg: flags of inference. source: a model to load instead. task, options: of
    modelcenter.from_pretrained."""
    options = {"policy": load_policy(cfg), "revision": cfg.revision, **options}
    return modelcenter.from_pretrained(source or trained.source, task, **options)


def load_policy(cfg: Any) -> engine.Policy:
    """The sharding policy in the flags."""
    return engine.Policy(zero_level=cfg.zero, precision=resolve_precision(cfg.precision))


def load_tokenizer(cfg: Any, trained: TrainedModel) -> Any:
    """The tokenizer that the flags name, or the model's."""
    revision = {"revision": cfg.revision} if cfg.revision and cfg.tokenizer is None else {}
    return modelcenter.AutoTokenizer.from_pretrained(cfg.tokenizer or trained.source, **revision)


def max_length_of(trained: TrainedModel, model: Model, tokenizer: Any, requested: int | None) -> int:
    """The maximum tokens of a row: the requested number, else that of the run that trained the model, else that of
    resolve_max_length, which may raise ValueError."""
    of_run = None if trained.run is None else trained.run.max_length
    return resolve_max_length(model, tokenizer, requested or of_run)
