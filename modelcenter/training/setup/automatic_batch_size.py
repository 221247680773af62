"""--batch_size auto: rows of a microbatch that fit the memory, measured before the run starts."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import engine
from modelcenter.models.base import Model
from modelcenter.training.accumulation import accumulate
from modelcenter.training.config import TrainConfig
from modelcenter.training.setup.memory import optimizer_bytes
from modelcenter.training.setup.model import fix_batches
from modelcenter.training.tasks.base import Examples

_GLOBAL = 32  # rows of a step where no flag says how many
_CPU_TOKENS = 8192  # of a microbatch: more gains no speed on a CPU
_NO_ROOM = 1 << 60  # bytes, more than any memory has
_ROOM = 0.85  # of the device's memory that this process can have


def fit_batch(cfg: TrainConfig, task: Any, model: Model, examples: Examples) -> None:
    """Set batch_size, where it is auto: the most rows, as long as the longest there are, that fit the memory, and a
    divisor of what each rank has to do of global_batch_size. Where no flag says that, a step has about _GLOBAL rows, or
    fewer if so many microbatches as asked for have no room for them. Collective.

    Raises:
        ValueError: the ranks cannot share global_batch_size, or there is no memory for one row.
    """
    if cfg.batch_size != cfg.AUTO:
        return
    ranks, steps, whole = engine.data_size(), cfg.gradient_accumulation_steps, cfg.global_batch_size
    parts = ranks * (steps or 1)
    each, rest = divmod(whole or max(_GLOBAL, parts), parts)
    if whole is not None and (rest or not each):
        raise ValueError(
            f"global_batch_size: got {whole}, expected a multiple of {ranks} ranks times {steps or 1} microbatches"
        )
    longest = np.argsort(-examples.lengths, kind="stable")[:2]
    if engine.device().type == "cuda":
        free, _ = torch.cuda.mem_get_info()  # of other processes too: a GPU may be shared
        states = 0.0 if cfg.offload == "optimizer" else optimizer_bytes(cfg, model)
        room = _ROOM * (free + torch.cuda.memory_reserved()) - states
        most = rows_that_fit(*_bytes_of_rows(task, model, examples, longest), room)
    else:
        most = _CPU_TOKENS // int(examples.lengths[longest[0]])
    most = max(1, min(most, each))
    if engine.world_size() > 1:
        box = torch.tensor(most, device=engine.runtime.message_device())
        dist.all_reduce(box, op=dist.ReduceOp.MIN)
        most = int(box)
    if whole is None and steps is not None:
        cfg.batch_size = most
    else:
        cfg.batch_size = next(n for n in range(most, 0, -1) if each % n == 0)
        cfg.global_batch_size = each * parts
    fix_batches(cfg)


def rows_that_fit(one: int, more: int, room: float) -> int:
    """Rows whose step stays within the room, from the bytes of a step of one row and of each row more."""
    return 1 + max(0, int((room - one) // max(1, more)))


def _bytes_of_rows(task: Any, model: Model, examples: Examples, rows: np.ndarray) -> tuple[int, int]:
    """(peak bytes on the device of a step of the longest row, what one row more adds). Nothing of it stays.

    Each measured step has several microbatches, as the gradients of the first lie beside the activations of the next;
    a pipeline's first stage holds as many as there are stages. Where gradients are most of the peak it says little of
    rows: what forward has left for backward says it then. A second row that has no room adds more than any memory has.

    Raises:
        ValueError: the first has none.
    """
    peaks, kept = [], []

    def backward(loss: torch.Tensor) -> None:
        left.append(torch.cuda.memory_allocated())
        loss.backward()

    training = model.training
    with torch.random.fork_rng([torch.cuda.current_device()]):
        model.train()
        for count in (1, 2):
            left: list[int] = []  # none on the stages of a pipeline but the last
            batch = examples.batch(np.repeat(rows[:1], count))
            torch.cuda.reset_peak_memory_stats()
            parts = [batch] * max(2, engine.runtime.stages())
            try:
                accumulate(model, parts, task.loss_fn, backward=backward)
            except torch.OutOfMemoryError:
                # Other ranks may have had room, and wait for this one inside the step.
                if count == 1 or engine.world_size() > 1:
                    what = f"{count} row{'s' * (count > 1)} of {examples.lengths[rows[0]]:,} tokens"
                    less = "lower --max_length, or give --recompute full, or --zero 3 on more GPUs"
                    raise ValueError(
                        f"batch_size: a step of {what} does not fit the memory of rank {engine.rank()}'s GPU; "
                        + (less if count == 1 else "give --batch_size 1")
                    ) from None
                left.append(_NO_ROOM)
            model.zero_grad(set_to_none=True)
            peaks.append(torch.cuda.max_memory_allocated())
            kept.append(max(left, default=0))
        model.train(training)
    return peaks[0], max(peaks[1] - peaks[0], kept[1] - kept[0])
