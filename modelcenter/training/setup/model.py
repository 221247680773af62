"""From flags to a model that is ready to train: ranks, tokenizer, weights, batches per step, optimizer."""

import math
import os
import platform
import time
import uuid
import warnings
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import engine
import modelcenter
from engine.checkpoint import from_rank_0, together, wait_checkpoint
from engine.init import clean_name
from engine.lr_scheduler import WSD, Cosine, Linear, NoDecay
from engine.optim import (
    Adafactor,
    AdamOffloadOptimizer,
    AdamOptimizer,
    AdamW8bit,
    Lion,
    Muon,
    OptimManager,
)
from modelcenter.adapters import Freeze, Lora
from modelcenter.command_line.errors import naming
from modelcenter.data.batching.mixture import draw_of, parse_weight
from modelcenter.data.pretraining.text_rows import StreamRows
from modelcenter.data.sampling import EpochBatches, TokenBatches
from modelcenter.data.sources import is_hub_name
from modelcenter.data.streaming import StreamBatches
from modelcenter.data.token_files import is_tokens
from modelcenter.hub.load import check_same_commit
from modelcenter.hub.tokenizer import add_tokens
from modelcenter.models.base import Model
from modelcenter.training.batch_sources import Feed, Plan, RowFeed, StreamFeed
from modelcenter.training.checkpoints.resume import Continuation, find_continuation, keep_global_batch
from modelcenter.training.config import TrainConfig
from modelcenter.training.metrics import sums
from modelcenter.training.output import trackers
from modelcenter.training.output.folder import prepare_output
from modelcenter.training.output.lock import alone_in
from modelcenter.training.setup.rank_checks import check_flags

SCHEDULES: dict[str, Any] = {"linear": Linear, "cosine": Cosine, "constant": NoDecay, "wsd": WSD}
_SKIPS_IN_A_ROW = 8  # steps without a finite gradient after which a run gives up


def prepare(cfg: TrainConfig) -> AbstractContextManager[None]:
    """Check, on rank 0, that the run can write where it shall. Needs no other rank: see output.prepare_output.

    Returns:
        What to be inside of while the run lasts: it keeps other runs out of the folder.
    """
    trackers.chosen(cfg.trackers)
    if cfg.output_dir is None or cfg.dry_run or int(os.environ.get("RANK") or 0) != 0:
        return nullcontext()
    prepare_output(Path(cfg.output_dir), cfg.overwrite_output_dir)
    return alone_in(Path(cfg.output_dir))


def start(cfg: TrainConfig) -> Continuation | None:
    """Meet the other ranks, if a launcher started some, and resolve the flags that depend on the machine.

    Returns:
        The checkpoint that the run goes on from, if there is one.
    """
    engine.init_distributed(
        seed=cfg.seed,
        zero_level=cfg.zero,
        dp_replicate=cfg.dp_replicate,
        tp_size=cfg.tp,
        cp_size=cfg.cp,
        pp_size=cfg.pp,
        pp_chunks=2 if cfg.pp > 1 and cfg.pp_schedule == "interleaved" else 1,
    )
    check_flags(cfg)
    if cfg.output_dir is not None and not cfg.dry_run:
        check_shared(Path(cfg.output_dir).absolute())
    engine.memory.keep_freed_memory()  # each step asks for the buffers that the last one freed
    # Every step, of units whose states are views. Only what adds to them in place would go wrong: no block does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    cfg.precision = resolve_precision(cfg.precision)
    with suppress(Exception):  # of an earlier run in this process that failed: it has said so
        wait_checkpoint()  # which may still be writing to the folder that this one looks into, and clears
    continuation = find_continuation(cfg)
    if continuation is not None:
        keep_global_batch(cfg, continuation, engine.data_size())
    if cfg.batch_tokens is not None or cfg.batch_size != cfg.AUTO:
        fix_batches(cfg)
    return continuation


def check_shared(path: Path, patience: float = 10.0) -> None:
    """Make sure that all ranks see the folder that rank 0 writes to. Collective.

    Args:
        patience: seconds that a network file system gets to show a new file.

    Raises:
        ValueError: a rank does not see it.
    """
    if engine.world_size() == 1:
        return
    name = f".shared-{uuid.uuid4().hex[:8]}"
    with together(f"writing to {path}"):
        if engine.rank() == 0:
            (path / name).touch()
    name = from_rank_0(name)
    try:
        with together(f"looking into {path}"):
            ends = time.monotonic() + patience
            while not (path / name).exists():
                if time.monotonic() > ends:
                    raise ValueError(
                        f"output_dir: rank {engine.rank()} on {platform.node()} does not see what rank 0 wrote to "
                        f"{path}; give a folder on storage that all nodes share"
                    )
                time.sleep(0.1)
    finally:
        if engine.rank() == 0:
            (path / name).unlink(missing_ok=True)


def fix_batches(cfg: TrainConfig) -> None:
    """Work out rows (or tokens) per step and microbatches per step, from one another.

    Raises:
        ValueError: they do not fit together.
    """
    cfg.gradient_accumulation_steps = cfg.accumulation(engine.data_size())
    parts = cfg.gradient_accumulation_steps * engine.data_size()
    if cfg.batch_tokens is not None:
        cfg.global_batch_tokens = cfg.batch_tokens * parts
    else:
        cfg.global_batch_size = cfg.batch_size * parts
        cfg.eval_batch_size = cfg.eval_batch_size or 2 * cfg.batch_size


def fix_evaluation(cfg: TrainConfig, *examples: Any) -> None:
    """Where batches are counted in tokens: rows of an evaluation's, of which the longest have no more than twice the
    tokens of a microbatch. examples: what is evaluated, the training rows by DPO's reference; streams are not."""
    lengths = [int(rows.lengths.max()) for rows in examples if hasattr(rows, "lengths")]
    if cfg.batch_tokens is not None and cfg.eval_batch_size is None and lengths:
        cfg.eval_batch_size = max(1, 2 * cfg.batch_tokens // max(lengths))


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
        with naming("tokenizer"):
            return modelcenter.AutoTokenizer.from_pretrained(cfg.tokenizer)
    if cfg.from_scratch:
        raise ValueError("--tokenizer is needed: with --from_scratch the model brings none")
    revision = {"revision": cfg.revision} if cfg.revision else {}
    with naming("model"):
        return modelcenter.AutoTokenizer.from_pretrained(cfg.model, **revision)


def build_model(cfg: TrainConfig, task: Any, tokenizer: Any) -> Model:
    """The model with the task's head, sharded as the flags say, weights in fp32; fixes cfg.max_length.

    Raises:
        ValueError: what modelcenter.from_pretrained raises; a tokenizer with more tokens than the model.
    """
    with naming("model"):
        model = _load_model(cfg, task, tokenizer)
    vocab_size = getattr(model.config, "vocab_size", len(tokenizer))
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"tokenizer: {cfg.tokenizer or cfg.model} has {len(tokenizer)} tokens, but the model's vocab_size is "
            f"{vocab_size}: they do not belong together"
        )
    if model.task == "causal-lm" and not getattr(model.config, "is_decoder", True):
        raise ValueError(
            f"model: {cfg.model} is an encoder, in which a token sees those it is to predict; take a decoder, such as "
            "openai-community/gpt2, or make it one: --model_config is_decoder=true"
        )
    cfg.max_length = max_length(model, tokenizer, cfg.max_length)
    if model.config.max_tokens and tokenizer.model_max_length > model.config.max_tokens:
        # It is saved with the model: transformers cuts by what it says, and else a long text runs off the positions.
        tokenizer.model_max_length = model.config.max_tokens
    fit_inputs(tokenizer, model)
    if cfg.label_smoothing and task.loss_fn is None:
        smooth_labels(model, cfg.label_smoothing)
    task.attach(model)
    return model


def _load_model(cfg: TrainConfig, task: Any, tokenizer: Any) -> Model:
    """The model of --model, with --add_tokens and adapters, sharded."""
    options: dict[str, Any] = dict(task.model_options(), dtype="float32", seed=cfg.seed, **cfg.model_config)
    options["policy"] = engine.Policy(
        zero_level=cfg.zero, precision=cfg.precision, recompute=cfg.recompute, compile=cfg.compile
    )
    name: Any = cfg.model
    adapters = options["adapter"] = make_adapters(cfg)
    if cfg.from_scratch:
        tokenizer.add_tokens(cfg.add_tokens or [])
        sizes = {"vocab_size": len(tokenizer), **task.special_tokens(tokenizer)}
        return modelcenter.from_config(name, task.head, **{**sizes, **options})
    found = {"ignore_mismatched_sizes": cfg.ignore_mismatched_sizes, "revision": cfg.revision}
    if not cfg.add_tokens:
        return modelcenter.from_pretrained(name, task.head, **found, **options)
    # New rows are made before anything is sharded.
    model = modelcenter.from_pretrained(name, task.head, **found, **{**options, "policy": False, "adapter": None})
    check_same_commit(cfg.model or "", model.base_revision)
    add_tokens(tokenizer, model, cfg.add_tokens)
    for adapter in adapters:
        adapter.attach(model)
    return engine.shard(model, policy=options["policy"])


def make_adapters(cfg: TrainConfig, trained: list[str] | None = None) -> list[Any]:
    """What --freeze and --lora_rank put into the model; see modelcenter.adapters. trained: parameters to train whole
    beside the updates; None: as Lora finds them."""
    adapters: list[Any] = [Freeze(cfg.freeze)] if cfg.freeze else []
    if cfg.lora_rank is not None:
        more = {"use_dora": cfg.use_dora, "use_rslora": cfg.use_rslora, "quantize": cfg.quantize}
        adapters.append(Lora(cfg.lora_rank, cfg.lora_alpha, cfg.lora_dropout, cfg.lora_targets, trained, **more))
    return adapters


def smooth_labels(model: Model, share: float) -> None:
    """Let the loss in training take this share of each label's weight and spread it over all classes.

    Raises:
        ValueError: a head without classes.
    """
    head: Any = getattr(model, "head", None)
    if head is None and model.pipeline is not None:
        return  # another stage has it
    kind = getattr(model.config, "problem_type", None) if model.task == "sequence-classification" else None
    if not hasattr(head, "label_smoothing") or kind not in (None, "single_label_classification"):
        what = f"{model.task}, {kind}" if kind else model.task
        raise ValueError(f"label_smoothing: for one label among classes, not for {what}; leave it out")
    head.label_smoothing = share


def fit_inputs(tokenizer: Any, model: Model) -> None:
    """Let a tokenizer number the texts of a row for models with a table of token types alone: GPT-2 would take the
    numbers for words. The tokenizer that is saved says so, too."""
    if not getattr(model.config, "type_vocab_size", 0) and "token_type_ids" in tokenizer.model_input_names:
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names


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


def make_feed(cfg: TrainConfig, examples: Any) -> Feed:
    """The batches of the run, by rows or by tokens; of a mixture, the rows that it draws for each epoch."""
    assert cfg.gradient_accumulation_steps is not None
    if isinstance(examples, StreamRows):
        return stream_feed(cfg, examples)
    draw = draw_of(examples, cfg.seed)
    if cfg.batch_tokens is not None:
        assert cfg.global_batch_tokens is not None
        sizes = (cfg.global_batch_tokens, cfg.seed, cfg.batch_tokens)
        plan: Plan = TokenBatches(examples.lengths, *sizes, draw=draw)
    else:
        assert cfg.global_batch_size is not None
        plan = EpochBatches(examples.lengths, cfg.global_batch_size, cfg.seed, draw)
    steps = cfg.max_steps or max(1, math.ceil(cfg.epochs * plan.steps - 1e-6))
    return RowFeed(examples, plan, steps, cfg.gradient_accumulation_steps)


def stream_feed(cfg: Any, examples: StreamRows) -> StreamFeed:
    """The batches of a run over a stream."""
    sizes: dict[str, Any] = {"global_batch_size": cfg.global_batch_size}
    if cfg.batch_tokens is not None:
        sizes = {"budget": cfg.global_batch_tokens, "part": cfg.batch_tokens}
    make: dict[str, Any] = {"length": examples.length, "several": True, "window": cfg.shuffle_window, "seed": cfg.seed}
    stream = StreamBatches(examples.source, examples.pieces, **sizes, **make)
    return StreamFeed(examples, stream, cfg.max_steps, cfg.gradient_accumulation_steps)


def make_optimizer(cfg: TrainConfig, model: Model, steps: int) -> tuple[OptimManager, Any]:
    """The optimizer over the sharded parameters (with Muon: it and AdamW), the schedules of their learning rates, and
    the manager of both. Biases and norms do not decay. Collective.

    Returns:
        (manager, the schedule of its first optimizer)
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices, vectors = [p for _, p in trained if p.dim() > 1], [p for _, p in trained if p.dim() <= 1]
    hidden: list[Any] = []
    if cfg.optimizer == "muon":
        # As its authors: embeddings, the head and vectors stay with AdamW. Tables are no products, of whatever name.
        layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        inner = {f"{name}.weight" for name in layers if not model.is_head(clean_name(f"{name}."))}
        hidden = [p for name, p in trained if name in inner]
        inside = set(map(id, hidden))
        matrices = [p for p in matrices if id(p) not in inside]
    # Stages of a pipeline train different parameters, but all have the same optimizers, some of them of nothing.
    anywhere = sums([len(hidden), len(matrices), len(vectors)])
    if not any(anywhere):
        raise ValueError("freeze: no parameter is left to train")
    assert cfg.adam_beta2 is not None
    betas = cfg.adam_beta1, cfg.adam_beta2
    optimizers: list[Any] = []
    if anywhere[0]:
        own = [{"params": hidden}]
        optimizers.append(Muon(own, cfg.lr, weight_decay=cfg.weight_decay, adjust_lr="match_rms_adamw"))
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay, count in zip((matrices, vectors), (cfg.weight_decay, 0.0), anywhere[1:], strict=True)
        if count
    ]
    if groups and cfg.optimizer == "lion":
        optimizers.append(Lion(groups, lr=cfg.lr, betas=betas))
    elif groups and cfg.optimizer == "adafactor":
        optimizers.append(Adafactor(groups, lr=cfg.lr))
    elif groups:
        kind: Any = AdamW8bit if cfg.optimizer == "adamw8bit" else AdamOptimizer
        kind = AdamOffloadOptimizer if cfg.offload == "optimizer" else kind
        optimizers.append(kind(groups, lr=cfg.lr, betas=betas, eps=cfg.adam_epsilon))
    # As transformers, but a run of one step is not spent at learning rate 0.
    warmup = min(math.ceil(cfg.warmup * steps), steps - 1) if cfg.warmup < 1 else int(cfg.warmup)
    fp16 = {"loss_scale": 2.0**16} if cfg.precision == "fp16" else {}
    manager = OptimManager(abort_after=_SKIPS_IN_A_ROW, **fp16)
    for optimizer in optimizers:
        manager.add_optimizer(optimizer, SCHEDULES[cfg.lr_scheduler](optimizer, cfg.lr, warmup, steps))
    return manager, manager.lr_schedulers[0]


def data_name(cfg: TrainConfig) -> str | None:
    """The Hub name of the training data, for the model card; None for local files."""
    names = [parse_weight(entry)[0] for entry in cfg.train_data or []]
    return names[0] if len(names) == 1 and is_hub_name(names[0]) and not is_tokens(names[0]) else None
