"""The sizes of a step, in rows or in tokens, over microbatches and ranks, as they follow from the flags.

Each function returns {flag: value} and changes no flags itself; see resolve.py.
"""

import logging

import engine
from modelcenter.training.checkpoints.resume import Continuation
from modelcenter.training.config import TrainConfig

log = logging.getLogger(__name__)


def step_sizes(cfg: TrainConfig, ranks: int) -> dict[str, int | None]:
    """Microbatches and rows (or tokens) per step, from those sizes that are given.

    Raises:
        ValueError: the sizes contradict each other.
    """
    steps = cfg.accumulation(ranks)
    if cfg.batch_tokens is not None:
        return {"gradient_accumulation_steps": steps, "global_batch_tokens": cfg.batch_tokens * steps * ranks}
    assert cfg.batch_size != "auto"
    return {
        "gradient_accumulation_steps": steps,
        "global_batch_size": cfg.batch_size * steps * ranks,
        "eval_batch_size": cfg.eval_batch_size or 2 * cfg.batch_size,
    }


def continued_batch_sizes(cfg: TrainConfig, continuation: Continuation, ranks: int) -> dict[str, int | None]:
    """Sizes that keep a resumed run's global batch on any number of ranks, by adapting the microbatch and the
    accumulation; {} if the run has no global batch to keep, or the flags ask for another.

    Raises:
        ValueError: this number of ranks cannot share the global batch equally.
    """
    if cfg.batch_tokens is not None:
        return _continued_tokens(cfg, continuation, ranks)
    kept = continuation.flags.get("global_batch_size")
    if kept is None or cfg.global_batch_size not in (None, kept):
        return {}
    rows_per_rank, rest = divmod(kept, ranks)
    if rest or not rows_per_rank:
        raise ValueError(
            f"global_batch_size: the run in {continuation.checkpoint} has {kept}, which {ranks} ranks cannot share "
            "equally; use a number of ranks that divides it"
        )
    if cfg.batch_size == "auto":
        return {"global_batch_size": kept, "gradient_accumulation_steps": None}
    _report_kept(continuation, cfg.batch_size * (cfg.gradient_accumulation_steps or 1) * ranks, kept, "size")
    batch_size = largest_divisor(rows_per_rank, cfg.batch_size)
    return {
        "batch_size": batch_size,
        "global_batch_size": kept,
        "gradient_accumulation_steps": rows_per_rank // batch_size,
    }


def _continued_tokens(cfg: TrainConfig, continuation: Continuation, ranks: int) -> dict[str, int | None]:
    """The same for batches by tokens, which consist of parts of batch_tokens that the ranks share."""
    assert cfg.batch_tokens is not None
    kept = continuation.flags.get("global_batch_tokens")
    if (
        kept is None
        or cfg.global_batch_tokens not in (None, kept)
        or continuation.flags["batch_tokens"] != cfg.batch_tokens
    ):
        return {}  # the check of the flags reports the difference
    parts = kept // cfg.batch_tokens
    if parts % ranks:
        raise ValueError(
            f"global_batch_tokens: the run in {continuation.checkpoint} has {kept}, {parts} parts of batch_tokens, "
            f"which {ranks} ranks cannot share equally; use a number of ranks that divides them"
        )
    requested = cfg.batch_tokens * (cfg.gradient_accumulation_steps or 1) * ranks
    _report_kept(continuation, requested, kept, "tokens")
    return {"global_batch_tokens": kept, "gradient_accumulation_steps": parts // ranks}


def _report_kept(continuation: Continuation, requested: int, kept: int, unit: str) -> None:
    """Warn that a step keeps its size although the flags, which may differ in a forced resume, ask for another."""
    if continuation.forced and requested != kept and engine.rank() == 0:
        log.warning(
            "resume: a step keeps its global_batch_%s of %d, although the flags give %d; to change it, give "
            "--global_batch_%s too",
            unit, kept, requested, unit,
        )  # fmt: skip


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(n for n in range(min(limit, number), 0, -1) if number % n == 0)
