"""--dry_run: what a run would do and cost, from its data and one step that leaves nothing behind."""

import time
from typing import Any

import numpy as np

import engine
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig
from modelcenter.training.loop import Run
from modelcenter.training.record import Record, peak_memory
from modelcenter.training.tasks import Examples


def dry_run(
    cfg: TrainConfig, task: Any, model: Model, tokenizer: Any, train_set: Examples, eval_set: Examples | None
) -> None:
    """Print the plan and a decoded batch on rank 0, then run one step on every rank. Writes nothing."""
    run = Run(cfg, task, model, train_set, eval_set)
    run.record = Record(None, run.schedule.steps, writer=False)
    first = run.schedule.batches.epoch(0)[0]
    if engine.rank() == 0:
        for name, value in _plan(cfg, run, eval_set):
            print(f"{name:<11} {value}")
        print("\nFirst batch, longest rows first:")
        for row in first[:4]:
            text = tokenizer.decode(train_set.tokens.row(row))
            shown = text if len(text) < 160 else text[:157] + "..."
            print(f"  [{task.describe(train_set, int(row))}] {shown}  ({train_set.table.where(int(row))})")
    model.train()
    began = time.perf_counter()
    loss, norm, _ = run.train_step(first)
    values = loss.item(), norm.item()
    seconds = time.perf_counter() - began
    if engine.rank() == 0:
        peak = ", ".join(f"{name.removesuffix('_bytes')} {_bytes(n)}" for name, n in peak_memory().items())
        print(f"\nOne step: loss {values[0]:.4f}, gradient norm {values[1]:.4f}, {seconds:.2f} s")
        print(f"Peak memory of rank 0: {peak}. Nothing was written.")


def _plan(cfg: TrainConfig, run: Run, eval_set: Examples | None) -> list[tuple[str, str]]:
    model, lengths, ranks = run.model, run.train_set.lengths, engine.data_size()
    schedule, parameters = run.schedule, model.num_parameters()
    points = np.percentile(lengths, [0, 50, 95, 100]).astype(int)
    cut = run.train_set.tokens.truncated
    split = {"tensor": cfg.tp, "context": cfg.cp, "pipeline": cfg.pp}
    shards = max(1, ranks * cfg.cp // cfg.dp_replicate)
    state = memory_of_state(parameters // (cfg.tp * cfg.pp), cfg.zero, shards)
    tokens = int(lengths.sum())
    rows = [
        ("model", f"{cfg.model}: {type(model).__name__}, {parameters:,} parameters, {run.task.head}"),
        ("labels", _labels(model)),
        ("train", f"{len(lengths):,} rows, {tokens:,} tokens from {run.train_set.table.name}"),
        ("eval", "none" if eval_set is None else f"{len(eval_set):,} rows from {eval_set.table.name}"),
        ("lengths", f"shortest {points[0]}, median {points[1]}, 95 % {points[2]}, longest {points[3]} tokens; "
         f"{cut} rows cut at {cfg.max_length}"),
        ("padding", f"none; {100 * padding_if_padded(lengths, cfg.batch_size, cfg.seed):.1f} % of the slots if "
         "rows were padded to the longest of their batch"),
        ("step", f"{cfg.global_batch_size} rows, {cfg.batch_size} x {schedule.microbatches} parts x {ranks} ranks"
         + "".join(f", {name} {size}" for name, size in split.items() if size > 1)),
        ("steps", f"{schedule.steps:,} ({schedule.steps_per_epoch:,} per epoch), warmup {run.rate.warmup_iter}, "
         f"lr {cfg.lr:g} {cfg.lr_scheduler}"),
        ("precision", f"{cfg.precision} on {engine.device()}, ZeRO level {cfg.zero}"),
        ("memory", f"about {_bytes(state)} per rank for weights, gradients and optimizer, activations apart"),
    ]  # fmt: skip
    return rows


def _labels(model: Model) -> str:
    names = list((model.config.id2label or {}).values())
    shown = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
    return f"{model.config.problem_type}: {shown}"


def memory_of_state(parameters: int, zero: int, shards: int) -> float:
    """Bytes per rank of fp32 weights, gradients and AdamW's two moments at a ZeRO level."""
    weights, gradients, moments = 4 * parameters, 4 * parameters, 8 * parameters
    return (
        weights / (shards if zero == 3 else 1)
        + gradients / (shards if zero >= 2 else 1)
        + moments / (shards if zero >= 1 else 1)
    )


def padding_if_padded(lengths: np.ndarray, batch_size: int, seed: int) -> float:
    """The fraction of slots that are padding when shuffled rows are padded to the longest of their batch."""
    order = np.random.default_rng(seed).permutation(lengths)
    slots = sum(len(part) * int(part.max()) for part in np.split(order, range(batch_size, len(order), batch_size)))
    return 1 - int(lengths.sum()) / max(slots, 1)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
