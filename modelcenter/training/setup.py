"""From flags to a model that is ready to train: ranks, tokenizer, weights, batches per step, optimizer."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import engine
import modelcenter
from engine.lr_scheduler import Cosine, Linear, NoDecay
from engine.optim import AdamOptimizer, OptimManager
from modelcenter.data.sampling import EpochBatches, deal
from modelcenter.hub.download import HubOptions
from modelcenter.hub.resolve import resolve
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig
from modelcenter.training.record import prepare_output

_SKIPS_IN_A_ROW = 8  # steps without a finite gradient after which a run gives up


def prepare(cfg: TrainConfig) -> None:
    """Check, on rank 0, that the run can write where it shall. Needs no other rank: see record.prepare_output."""
    if cfg.output_dir is not None and not cfg.dry_run and int(os.environ.get("RANK") or 0) == 0:
        prepare_output(Path(cfg.output_dir), cfg.overwrite_output_dir)


def start(cfg: TrainConfig) -> None:
    """Meet the other ranks, if a launcher started some, and resolve the flags that depend on the machine."""
    engine.init_distributed(
        seed=cfg.seed,
        zero_level=cfg.zero,
        dp_replicate=cfg.dp_replicate,
        tp_size=cfg.tp,
        cp_size=cfg.cp,
        pp_size=cfg.pp,
        pp_chunks=2 if cfg.pp > 1 and cfg.pp_schedule == "interleaved" else 1,
    )
    engine.memory.keep_freed_memory()  # each step asks for the buffers that the last one freed
    cfg.precision = resolve_precision(cfg.precision)
    cfg.gradient_accumulation_steps = cfg.accumulation(engine.data_size())
    cfg.global_batch_size = cfg.batch_size * cfg.gradient_accumulation_steps * engine.data_size()
    cfg.eval_batch_size = cfg.eval_batch_size or 2 * cfg.batch_size


def resolve_precision(precision: str) -> str:
    """What "auto" means on this machine; anything else as it is."""
    if precision != "auto":
        return precision
    native = engine.device().type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp32"


def load_tokenizer(cfg: TrainConfig) -> Any:
    """The tokenizer of --tokenizer, else of --model.

    Raises:
        ValueError: there is none.
    """
    if cfg.tokenizer is not None:
        return modelcenter.AutoTokenizer.from_pretrained(cfg.tokenizer)
    if cfg.from_scratch:
        raise ValueError("--tokenizer is needed: with --from_scratch the model brings none")
    resolve(cfg.model, HubOptions(cfg.revision), weights=False)  # a misspelt model is told as such, with the nearest
    return modelcenter.AutoTokenizer.from_pretrained(cfg.model, **({"revision": cfg.revision} if cfg.revision else {}))


def build_model(cfg: TrainConfig, task: Any, tokenizer: Any) -> Model:
    """The model with the task's head, sharded as the flags say, weights in fp32; fixes cfg.max_length.

    Raises:
        ValueError: what modelcenter.from_pretrained raises; a tokenizer with more tokens than the model.
    """
    options: dict[str, Any] = dict(task.model_options(), dtype="float32", seed=cfg.seed, **cfg.model_config)
    options["policy"] = engine.Policy(
        zero_level=cfg.zero, precision=cfg.precision, recompute=cfg.recompute, compile=cfg.compile
    )
    name: Any = cfg.model
    if cfg.from_scratch:
        sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        model = modelcenter.from_config(name, task.head, **{**sizes, **options})
    else:
        mismatched = {"ignore_mismatched_sizes": cfg.ignore_mismatched_sizes, "revision": cfg.revision}
        model = modelcenter.from_pretrained(name, task.head, **mismatched, **options)
    vocab_size = getattr(model.config, "vocab_size", len(tokenizer))
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"tokenizer: {cfg.tokenizer or cfg.model} has {len(tokenizer)} tokens, but the model's vocab_size is "
            f"{vocab_size}: they do not belong together"
        )
    cfg.max_length = max_length(model, tokenizer, cfg.max_length)
    return model


def max_length(model: Model, tokenizer: Any, wanted: int | None) -> int:
    """Tokens a row may have: what was asked for, else the least of what the model and the tokenizer take.

    Raises:
        ValueError: more was asked for than the model's position table has, or too few for any text.
    """
    most = min(model.config.max_tokens or 2**31, tokenizer.model_max_length)
    if wanted is None:
        return most if most < 2**31 else 512
    positions = model.config.max_tokens or wanted
    if wanted > positions:
        raise ValueError(f"max_length: got {wanted}, the position table of this model has {positions}")
    special = tokenizer.num_special_tokens_to_add(pair=True)
    if wanted <= special:
        raise ValueError(f"max_length: got {wanted}, expected more than the {special} special tokens of a row")
    return wanted


@dataclass(frozen=True)
class Schedule:
    """Which rows each step trains on: a function of the flags and the lengths of the rows, the same on all ranks."""

    batches: EpochBatches
    microbatches: int
    steps: int

    @classmethod
    def of(cls, cfg: TrainConfig, lengths: np.ndarray) -> "Schedule":
        assert cfg.global_batch_size is not None and cfg.gradient_accumulation_steps is not None
        batches = EpochBatches(lengths, cfg.global_batch_size, cfg.seed)
        steps = cfg.max_steps or max(1, math.ceil(cfg.epochs * batches.steps - 1e-6))
        return cls(batches, cfg.gradient_accumulation_steps, steps)

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps

    def rank_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """This rank's microbatches of a global batch; the empty ones of a short last batch are left out."""
        return [part for part in deal(rows, engine.data_size(), self.microbatches)[engine.data_rank()] if len(part)]


def make_optimizer(cfg: TrainConfig, model: Model, steps: int) -> tuple[OptimManager, AdamOptimizer, Linear]:
    """AdamW over the sharded parameters, and the schedule of its learning rate. Biases and norms do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = AdamOptimizer(
        [group for group in groups if group["params"]],
        lr=cfg.lr,
        betas=(cfg.adam_beta1, cfg.adam_beta2),
        eps=cfg.adam_epsilon,
    )
    kind = {"linear": Linear, "cosine": Cosine, "constant": NoDecay}[cfg.lr_scheduler]
    # As transformers, but a run of one step is not spent at learning rate 0.
    warmup = min(math.ceil(cfg.warmup * steps), steps - 1) if cfg.warmup < 1 else int(cfg.warmup)
    schedule = kind(optimizer, cfg.lr, warmup, steps)
    manager = OptimManager(abort_after=_SKIPS_IN_A_ROW)
    manager.add_optimizer(optimizer, schedule)
    return manager, optimizer, schedule


def data_name(cfg: TrainConfig) -> str | None:
    """The Hub name of the training data, for the model card; None for local files."""
    names = cfg.train_data or []
    return names[0] if len(names) == 1 and not Path(names[0]).exists() and "/" in names[0] else None
