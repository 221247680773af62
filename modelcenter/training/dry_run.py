"""--dry_run: what a run would do and cost, estimated from its data and one step. Leaves nothing behind."""

import time
from typing import Any

import numpy as np

import engine
from engine.memory import readable
from modelcenter.data.examples import Examples
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig
from modelcenter.training.distillation.loss import Distillation
from modelcenter.training.loop import Run
from modelcenter.training.output.summary import peak_memory
from modelcenter.training.setup.memory import StateBytes, state_bytes
from modelcenter.training.setup.prepare import PreparedRun
from modelcenter.training.tasks.base import Task


def dry_run(cfg: TrainConfig, prepared: PreparedRun) -> None:
    """Print the plan and a decoded batch on rank 0, then run one step on every rank. Writes nothing."""
    run = Run(cfg, prepared)
    first = next(iter(run.batch_source.batches()))
    if engine.rank() == 0:
        for name, value in _plan(cfg, run, run.eval_set):
            print(f"{name:<11} {value}")
        print("\nFirst batch, longest rows first:")
        for row in first.rows[:4]:
            print(f"  {run.train_set.show(row, run.tokenizer)}  ({run.train_set.where(row)})")
    run.task.on_train_begin(run.model, run.tokenizer)
    run.model.train()
    began = time.perf_counter()
    loss, norm, _ = run.train_step(first)
    values = loss.item(), norm.item()
    seconds = time.perf_counter() - began
    if engine.rank() == 0:
        peak = ", ".join(f"{name.removesuffix('_bytes')} {readable(n)}" for name, n in peak_memory().items())
        print(f"\nOne step: loss {values[0]:.4f}, gradient norm {values[1]:.4f}, {seconds:.2f} s")
        print(f"Peak memory of rank 0: {peak}. Nothing was written.")


def _plan(cfg: TrainConfig, run: Run, eval_set: Examples | None) -> list[tuple[str, str]]:
    model, examples, source, ranks = run.model, run.train_set, run.batch_source, engine.data_size()
    parameters = model.num_parameters()
    split = {"tensor": cfg.tp, "context": cfg.cp, "pipeline": cfg.pp}
    state, distillation = state_bytes(cfg, model), run.task.distillation
    if distillation is not None:
        beside = state_bytes(cfg, distillation.teacher.model)
        state = StateBytes(*map(sum, zip(state, beside, strict=True)))
    on_host = f", and {readable(state.host)} of host memory for the optimizer" if state.host else ""
    gathered = f", {readable(state.gathered)} for what a step gathers" if state.gathered else ""
    trained = model.num_parameters(only_trainable=True)
    share = "" if trained == parameters else f", {trained:,} of them trained"
    products = "" if cfg.matmul_precision == "highest" else f" (products of fp32: {cfg.matmul_precision})"
    parts = cfg.gradient_accumulation_steps
    labels = _labels(model)
    epoch = "" if source.steps_per_epoch is None else f" ({source.steps_per_epoch:,} per epoch)"
    return [
        ("model", f"{cfg.model}: {type(model).__name__}, {parameters:,} parameters{share}, {run.task.head}"),
        *([] if distillation is None else [("teacher", _taught_by(distillation))]),
        *([("labels", labels)] if labels else []),
        ("train", _amount(examples)),
        ("rows", run.task.describe_columns()),
        ("eval", "none" if eval_set is None else f"{len(eval_set):,} rows from {eval_set.name}"),
        *_length_lines(cfg, run.task, examples),
        ("step", (f"{cfg.batch_tokens} tokens" if cfg.batch_tokens is not None else
         f"{cfg.global_batch_size} rows, {cfg.batch_size}")
         + f" x {parts} parts x {ranks} ranks"
         + "".join(f", {name} {size}" for name, size in split.items() if size > 1)),
        ("steps", f"{source.steps:,}{epoch}, warmup {run.lr_schedule.warmup_iter}, "
         f"lr {cfg.lr:g} {cfg.lr_scheduler}{f' to {cfg.min_lr:g}' if cfg.min_lr else ''}"),
        ("precision", f"{cfg.precision}{products} on {engine.device()}, ZeRO level {cfg.zero}"),
        ("memory", f"about {readable(state.device)} per rank for weights, gradients and optimizer{on_host}{gathered}, "
         "plus activations"),
    ]  # fmt: skip


def _taught_by(distillation: Distillation) -> str:
    teacher = distillation.teacher
    kind, parameters = type(teacher.model).__name__, teacher.model.num_parameters()
    return f"{teacher.name}: {kind}, {parameters:,} parameters; {distillation.share:g} of the loss"


def _is_stream(examples: Any) -> bool:
    return not hasattr(examples, "lengths")


def _amount(examples: Any) -> str:
    if _is_stream(examples):
        return f"a stream of rows from {examples.name}"
    return f"{len(examples):,} rows, {int(examples.lengths.sum()):,} tokens from {examples.name}"


def _length_lines(cfg: TrainConfig, task: Task, examples: Any) -> list[tuple[str, str]]:
    if _is_stream(examples):
        return [("lengths", f"up to {cfg.max_length} tokens; longer texts make several rows"), ("padding", "none")]
    lengths = examples.lengths
    assert cfg.batch_size != "auto" and cfg.max_length is not None
    batch_rows = cfg.batch_size if cfg.batch_tokens is None else max(1, cfg.batch_tokens // int(lengths.mean()))
    points = np.percentile(lengths, [0, 50, 95, 100]).astype(int)
    return [
        ("lengths", f"shortest {points[0]}, median {points[1]}, 95 % {points[2]}, longest {points[3]} tokens; "
         f"{examples.truncated} rows truncated at {task.length_limit(cfg.max_length)}"),
        ("padding", f"none; {100 * padding_if_padded(lengths, batch_rows, cfg.seed):.1f} % of the slots if "
         "rows were padded to the longest of their batch"),
    ]  # fmt: skip


def _labels(model: Model) -> str:
    names = list((getattr(model.config, "id2label", None) or {}).values())
    if model.task not in ("sequence-classification", "token-classification"):
        return ""
    shown = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
    kind = (model.config.problem_type or "score") if model.task == "sequence-classification" else "tags"
    return f"{kind}: {shown}"


def padding_if_padded(lengths: np.ndarray, batch_size: int, seed: int) -> float:
    """The fraction of padding if shuffled rows were padded to the longest row of their batch."""
    order = np.random.default_rng(seed).permutation(lengths)
    slots = sum(len(part) * int(part.max()) for part in np.split(order, range(batch_size, len(order), batch_size)))
    return 1 - int(lengths.sum()) / max(slots, 1)
