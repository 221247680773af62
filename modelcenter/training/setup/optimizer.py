"""The optimizers of a run, the schedules of their learning rates, and the manager of both."""

import logging
import math
from typing import Any, NamedTuple

from torch import nn

import engine
from engine.lr_scheduler import WSD, Cosine, Linear, NoDecay
from engine.names import clean_name
from engine.optim import (
    Adafactor,
    AdamOffloadOptimizer,
    AdamOptimizer,
    AdamW8bit,
    Lion,
    Muon,
    OptimManager,
)
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig
from modelcenter.training.metrics import sums

log = logging.getLogger("modelcenter")

SCHEDULES: dict[str, Any] = {"linear": Linear, "cosine": Cosine, "constant": NoDecay, "wsd": WSD}
_MAX_SKIPS_IN_A_ROW = 8  # consecutive steps without a finite gradient after which a run gives up


def make_optimizer(cfg: TrainConfig, model: Model, steps: int) -> tuple[OptimManager, Any]:
    """The manager of the run's optimizer (with Muon: Muon and AdamW) and learning-rate schedules, over the sharded
    parameters. Biases and norms do not decay. Collective.

    Args:
        steps: number of steps of the whole run, for the schedules.

    Returns:
        (manager, the schedule of its first optimizer)

    Raises:
        ValueError: no parameter is left to train.
    """
    trained = _trained_parameters(model, muon=cfg.optimizer == "muon")
    # Pipeline stages train different parameters, but all have the same optimizers, even if some of them are empty.
    hidden_count, matrix_count, vector_count = sums([len(parameters) for parameters in trained])
    if not hidden_count + matrix_count + vector_count:
        raise ValueError("freeze: no parameter is left to train")
    optimizers: list[Any] = []
    if hidden_count:
        groups: list[dict[str, Any]] = [{"params": trained.hidden}]
        optimizers.append(Muon(groups, cfg.lr, weight_decay=cfg.weight_decay, adjust_lr="match_rms_adamw"))
    groups = [{"params": trained.matrices, "weight_decay": cfg.weight_decay}] if matrix_count else []
    groups += [{"params": trained.vectors, "weight_decay": 0.0}] if vector_count else []
    if groups:
        optimizers.append(_elementwise_optimizer(cfg, groups))
    # As in transformers, except that a run of one step does not have learning rate 0.
    warmup = min(math.ceil(cfg.warmup * steps), steps - 1) if cfg.warmup < 1 else int(cfg.warmup)
    if warmup >= steps and engine.rank() == 0:
        log.warning("warmup: %d steps of a run of %d, so the learning rate never reaches lr %g", warmup, steps, cfg.lr)
    loss_scale = 2.0**16 if cfg.precision == "fp16" else None
    manager = OptimManager(loss_scale, abort_after=_MAX_SKIPS_IN_A_ROW)
    end = {} if cfg.lr_scheduler == "constant" else {"end_lr": cfg.min_lr}
    for optimizer in optimizers:
        manager.add_optimizer(optimizer, SCHEDULES[cfg.lr_scheduler](optimizer, cfg.lr, warmup, steps, **end))
    return manager, manager.lr_schedulers[0]


class _Parameters(NamedTuple):
    """The trained parameters. hidden: weights of linear layers, for Muon; empty with other optimizers."""

    hidden: list[Any]
    matrices: list[Any]
    vectors: list[Any]


def _trained_parameters(model: Model, muon: bool) -> _Parameters:
    """The trained parameters of a model, as this rank holds them.

    Muon trains the weights of linear layers. As its authors advise, embeddings, the head and vectors stay with AdamW:
    tables are looked up, not multiplied.
    """
    hidden_names: set[str] = set()
    if muon:
        layers = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        hidden_names = {f"{name}.weight" for name in layers if not model.is_head(clean_name(f"{name}."))}
    trained = _Parameters([], [], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if name in hidden_names:
                trained.hidden.append(parameter)
            elif parameter.dim() > 1:
                trained.matrices.append(parameter)
            else:
                trained.vectors.append(parameter)
    return trained


def _elementwise_optimizer(cfg: TrainConfig, groups: list[dict[str, Any]]) -> Any:
    """The optimizer of --optimizer; with Muon, AdamW for what Muon does not train."""
    assert cfg.adam_beta2 is not None
    betas = cfg.adam_beta1, cfg.adam_beta2
    if cfg.optimizer == "lion":
        return Lion(groups, lr=cfg.lr, betas=betas)
    if cfg.optimizer == "adafactor":
        return Adafactor(groups, lr=cfg.lr)
    kind: Any = AdamW8bit if cfg.optimizer == "adamw8bit" else AdamOptimizer
    kind = kind if cfg.offload == "none" else AdamOffloadOptimizer
    return kind(groups, lr=cfg.lr, betas=betas, eps=cfg.adam_epsilon)
