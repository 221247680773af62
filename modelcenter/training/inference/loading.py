"""The model and the tokenizer that the flags of a verb name."""

from typing import Any

import engine
import modelcenter
from modelcenter.models.base import Model
from modelcenter.training.setup.resolve import resolve_precision, set_matmul_precision
from modelcenter.training.trained import TrainedModel


def load_model(cfg: Any, trained: TrainedModel, **options: Any) -> Model:
    """The model on all ranks, which multiply as the flags say.

    cfg: a PredictConfig or GenerateConfig. options: of modelcenter.from_pretrained.
    """
    set_matmul_precision(cfg.matmul_precision)
    policy = engine.Policy(zero_level=cfg.zero, precision=resolve_precision(cfg.precision))
    return modelcenter.from_pretrained(trained.source, None, revision=cfg.revision, policy=policy, **options)


def load_tokenizer(cfg: Any, trained: TrainedModel) -> Any:
    """The tokenizer that the flags name, else the model's."""
    revision = {"revision": cfg.revision} if cfg.revision and cfg.tokenizer is None else {}
    return modelcenter.AutoTokenizer.from_pretrained(cfg.tokenizer or trained.source, **revision)
