"""From flags to the tokenizer and the model with the task's head, sharded."""

import functools
from typing import Any

import engine
import modelcenter
from modelcenter.adapters import Freeze, Lora
from modelcenter.command_line.errors import flag_in_errors
from modelcenter.hub.load import check_same_commit
from modelcenter.hub.tokenizer import add_tokens
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig


def load_tokenizer(cfg: TrainConfig) -> Any:
    """The tokenizer of --tokenizer, else of --model.

    Raises:
        ValueError: there is none.
    """
    if cfg.tokenizer is not None:
        with flag_in_errors("tokenizer"):
            return modelcenter.AutoTokenizer.from_pretrained(cfg.tokenizer)
    if cfg.from_scratch:
        raise ValueError("--tokenizer is needed: with --from_scratch the model has none")
    revision = {"revision": cfg.revision} if cfg.revision else {}
    with flag_in_errors("model"):
        return modelcenter.AutoTokenizer.from_pretrained(str(cfg.model), **revision)


def build_model(cfg: TrainConfig, task: Any, tokenizer: Any) -> Model:
    """The model with the head of the task, sharded as the flags say. Adapts the tokenizer to it.

    Weights are in fp32; beside 4-bit weights (--quantize), those that are not trained may be in 16 bits.

    Raises:
        ValueError: what modelcenter.from_pretrained raises; the tokenizer has more tokens than the model.
    """
    with flag_in_errors("model"):
        model = _load_model(cfg, task, tokenizer)
    vocab_size = getattr(model.config, "vocab_size", len(tokenizer))
    if len(tokenizer) > vocab_size:
        why = "they do not belong together"
        if tokenizer.vocab_size <= vocab_size:
            added = tokenizer.get_added_vocab()
            last = max(added, key=added.__getitem__)
            why = f"the model has no rows for words that were added to it; --add_tokens {last!r} adds rows for all"
        raise ValueError(
            f"tokenizer: {cfg.tokenizer or cfg.model} has {len(tokenizer)} tokens, but the model's vocab_size is "
            f"{vocab_size}: {why}"
        )
    mask = getattr(model.config, "mask_token_id", None)  # only for models that embed the mask unlike other tokens
    if mask is not None and tokenizer.mask_token_id not in (None, mask):
        raise ValueError(
            f"mask_token_id: the model's mask is token {mask}, but in {cfg.tokenizer or cfg.model} "
            f"{tokenizer.mask_token!r} is {tokenizer.mask_token_id}; give --model_config "
            f"mask_token_id={tokenizer.mask_token_id}, or another tokenizer"
        )
    if model.task == "causal-lm" and not getattr(model.config, "is_decoder", True):
        raise ValueError(
            f"model: {cfg.model} is an encoder, in which tokens see those that they should predict; use a decoder, "
            "such as openai-community/gpt2, or make it one with --model_config is_decoder=true"
        )
    if model.config.max_tokens and tokenizer.model_max_length > model.config.max_tokens:
        # transformers truncates texts to the saved tokenizer's length; longer ones would exceed the position table.
        tokenizer.model_max_length = model.config.max_tokens
    omit_unused_token_types(tokenizer, model)
    if cfg.label_smoothing and task.loss_fn is None:
        smooth_labels(model, cfg.label_smoothing)
    task.on_model_built(model)
    return model


def _load_model(cfg: TrainConfig, task: Any, tokenizer: Any) -> Model:
    """Load or create the model of --model, with --add_tokens and adapters, and shard it."""
    # Weights that are quantised to 4 bits need not be held in fp32 first, unless the others compute in fp32.
    dtype = None if cfg.quantize is not None and cfg.precision != "fp32" else "float32"
    options: dict[str, Any] = dict(task.model_options(), dtype=dtype, seed=cfg.seed, **cfg.model_config)
    options["policy"] = engine.Policy(
        zero_level=cfg.zero,
        precision=cfg.precision,
        recompute=cfg.recompute,
        offload=cfg.offload,
        compile=cfg.compile,
    )
    adapters = options["adapter"] = make_adapters(cfg)
    grows = bool(cfg.add_tokens) and not cfg.from_scratch
    if cfg.from_scratch:
        tokenizer.add_tokens(cfg.add_tokens or [])
        build: Any = modelcenter.from_config
        fixed: dict[str, Any] = {"vocab_size": len(tokenizer), **task.special_tokens(tokenizer)}
        own: dict[str, Any] = {}
    else:
        build, fixed = modelcenter.from_pretrained, {"ignore_mismatched_sizes": cfg.ignore_mismatched_sizes}
        own = {"revision": cfg.revision}
    if not grows and not task.wraps_model:
        return build(cfg.model, task.head, **{**fixed, **own, **options})
    # Rows for new tokens, and a model around this one, must be made before anything is sharded.
    model = build(cfg.model, task.head, **{**fixed, **own, **options, "policy": False, "adapter": None})
    if grows:
        check_same_commit(cfg.model or "", model.base_revision)
        add_tokens(tokenizer, model, cfg.add_tokens or [])
        for adapter in adapters:
            adapter.attach(model)
        if not all(table.weight.requires_grad for table in model.word_tables().values()):
            raise ValueError(
                "freeze: the embedding is frozen, so the rows of the words in add_tokens would stay random; train it, "
                "or leave add_tokens out"
            )
    if task.wraps_model:
        model = task.wrap(model, functools.partial(build, **fixed, dtype=dtype, policy=False))
    return engine.shard(model, policy=options["policy"])


def make_adapters(cfg: TrainConfig, trained: list[str] | None = None) -> list[Any]:
    """The adapters of --freeze and --lora_rank; see modelcenter.adapters. trained: parameters to train in full besides
    the low-rank updates; None: those that Lora finds."""
    adapters: list[Any] = [Freeze(cfg.freeze)] if cfg.freeze else []
    if cfg.lora_rank is not None:
        lora = Lora(
            cfg.lora_rank,
            cfg.lora_alpha,
            cfg.lora_dropout,
            cfg.lora_targets,
            trained,
            use_dora=cfg.use_dora,
            use_rslora=cfg.use_rslora,
            quantize=cfg.quantize,
        )
        adapters.append(lora)
    return adapters


def smooth_labels(model: Model, share: float) -> None:
    """Apply label smoothing in training: spread this share of each label's weight over all classes.

    Raises:
        ValueError: the head has no classes.
    """
    head: Any = getattr(model, "head", None)
    if head is None and model.pipeline is not None:
        return  # another stage has it
    kind = getattr(model.config, "problem_type", None) if model.task == "sequence-classification" else None
    if not hasattr(head, "label_smoothing") or kind not in (None, "single_label_classification"):
        what = f"{model.task}, {kind}" if kind else model.task
        raise ValueError(f"label_smoothing: supported for one label among classes, not for {what}; leave it out")
    head.label_smoothing = share


def omit_unused_token_types(tokenizer: Any, model: Model) -> None:
    """Stop the tokenizer from giving token_type_ids to a model without a table for them: GPT-2 would look them up as
    words. This also holds for the tokenizer that is saved with the model."""
    if not getattr(model.config, "type_vocab_size", 0) and "token_type_ids" in tokenizer.model_input_names:
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
