"""--batch_size auto: how many rows of a microbatch fit in memory, measured before the run starts."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import engine
from modelcenter.data.examples import Examples
from modelcenter.models.base import Model
from modelcenter.training.accumulation import accumulate
from modelcenter.training.config import TrainConfig
from modelcenter.training.setup.batch_sizes import largest_divisor
from modelcenter.training.setup.memory import optimizer_bytes

_DEFAULT_GLOBAL_BATCH = 32  # rows of a step if no flag says how many
_CPU_TOKENS = 8192  # tokens of a microbatch: larger ones are no faster on a CPU
_UNBOUNDED = 1 << 60  # bytes, more than any device has
_USABLE_SHARE = 0.85  # of the device memory that this process can have


def largest_batch_sizes(cfg: TrainConfig, task: Any, model: Model, examples: Examples) -> dict[str, int]:
    """The sizes of a step for `--batch_size auto`, as {flag: value}. Collective.

    batch_size is the largest divisor of each rank's share of global_batch_size for which a microbatch of the longest
    rows fits in memory. If no flag gives global_batch_size, a step has about _DEFAULT_GLOBAL_BATCH rows, or fewer if
    the requested number of microbatches of that size does not fit.

    Raises:
        ValueError: the ranks cannot share global_batch_size, or a single row does not fit in memory.
    """
    ranks, steps, global_size = engine.data_size(), cfg.gradient_accumulation_steps, cfg.global_batch_size
    parts = ranks * (steps or 1)
    rows_per_part, rest = divmod(global_size or max(_DEFAULT_GLOBAL_BATCH, parts), parts)
    if global_size is not None and (rest or not rows_per_part):
        raise ValueError(
            f"global_batch_size: got {global_size}, expected a multiple of {ranks} ranks times {steps or 1} "
            "microbatches"
        )
    rows = max(1, min(_rows_that_fit_every_rank(cfg, task, model, examples), rows_per_part))
    if global_size is None and steps is not None:
        return {"batch_size": rows}
    return {"batch_size": largest_divisor(rows_per_part, rows), "global_batch_size": rows_per_part * parts}


def _rows_that_fit_every_rank(cfg: TrainConfig, task: Any, model: Model, examples: Examples) -> int:
    """How many rows, all of the greatest length, fit in the memory of every rank as one microbatch. Collective."""
    longest = int(np.argmax(examples.lengths))
    if engine.device().type == "cuda":
        free, _ = torch.cuda.mem_get_info()  # takes other processes into account: a GPU may be shared
        states = optimizer_bytes(cfg, model) if cfg.offload == "none" else 0.0
        room = _USABLE_SHARE * (free + torch.cuda.memory_reserved()) - states
        rows = rows_that_fit(*_bytes_of_rows(task, model, examples, longest), room)
    else:
        rows = _CPU_TOKENS // int(examples.lengths[longest])
    if engine.world_size() == 1:
        return rows
    fewest = torch.tensor(rows, device=engine.runtime.message_device())
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
    return int(fewest)


def rows_that_fit(first: int, further: int, room: float) -> int:
    """How many rows a step can have to stay within `room` bytes, at least 1.

    Args:
        first: peak bytes of a step of one row. further: bytes that each further row adds.
    """
    return 1 + max(0, int((room - first) // max(1, further)))


def _bytes_of_rows(task: Any, model: Model, examples: Examples, row: int) -> tuple[int, int]:
    """(peak device bytes of a step of one row, bytes that another row adds), measured. Leaves nothing behind.

    Each measured step has several microbatches, because the gradients of the first are held beside the activations of
    the next; a pipeline's first stage holds as many microbatches as there are stages. If gradients dominate the peak,
    it says little about rows, so the growth of what forward saves for backward counts too. A second row that does not
    fit counts as _UNBOUNDED.

    Raises:
        ValueError: a single row does not fit.
    """
    peaks, left_for_backward = [], []
    training = model.training
    with torch.random.fork_rng([torch.cuda.current_device()]):
        model.train()
        for count in (1, 2):
            peak, left = _bytes_of_step(task, model, examples, np.repeat(row, count))
            peaks.append(peak)
            left_for_backward.append(left)
        model.train(training)
    return peaks[0], max(peaks[1] - peaks[0], left_for_backward[1] - left_for_backward[0])


def _bytes_of_step(task: Any, model: Model, examples: Examples, rows: np.ndarray) -> tuple[int, int]:
    """(peak bytes of a step, most bytes that a forward left for backward) for microbatches of these rows."""
    left_for_backward: list[int] = []  # stays empty on all stages of a pipeline but the last

    def backward(loss: torch.Tensor) -> None:
        left_for_backward.append(torch.cuda.memory_allocated())
        loss.backward()

    microbatches = [examples.batch(rows)] * max(2, engine.runtime.stages())
    torch.cuda.reset_peak_memory_stats()
    try:
        accumulate(model, microbatches, task.loss_fn, backward=backward)
    except torch.OutOfMemoryError:
        # Other ranks may have had enough memory, and wait for this one inside the step.
        if len(rows) == 1 or engine.world_size() > 1:
            raise _out_of_memory(len(rows), int(examples.lengths[rows[0]])) from None
        left_for_backward.append(_UNBOUNDED)
    model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(), max(left_for_backward, default=0)


def _out_of_memory(rows: int, tokens: int) -> ValueError:
    remedy = "lower --max_length, or give --recompute full, or --zero 3 on more GPUs"
    return ValueError(
        f"batch_size: a step of {rows} row{'s' * (rows > 1)} of {tokens:,} tokens does not fit in the memory of rank "
        f"{engine.rank()}'s GPU; " + (remedy if rows == 1 else "give --batch_size 1")
    )
