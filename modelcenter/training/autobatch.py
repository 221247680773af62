"""--batch_size auto: rows of a microbatch that fit the memory, measured before the run starts."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import engine
from modelcenter.models.base import Model
from modelcenter.training.accumulation import accumulate
from modelcenter.training.config import TrainConfig
from modelcenter.training.setup import fix_batches
from modelcenter.training.tasks.base import Examples

_GLOBAL = 32  # rows of a step where no flag says how many
_CPU_TOKENS = 8192  # of a microbatch: more gains no speed on a CPU
_ROOM = 0.85  # of the device's memory


def fit_batch(cfg: TrainConfig, task: Any, model: Model, examples: Examples) -> None:
    """Set batch_size, where it is auto: the most rows, as long as the longest there are, that fit the memory, and a
    divisor of what each rank has to do of global_batch_size. Where no flag says that, a step has about _GLOBAL rows, or
    fewer if so many microbatches as asked for have no room for them. Collective.

    Raises:
        ValueError: the ranks cannot share global_batch_size.
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
        most = rows_that_fit(*_peaks(task, model, examples, longest), torch.cuda.mem_get_info()[1])
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


def rows_that_fit(one: int, two: int, total: int) -> int:
    """Rows whose step stays within the room, from the peak bytes of a step of one row and of two."""
    return 1 + max(0, int((_ROOM * total - one) // max(1, two - one)))


def _peaks(task: Any, model: Model, examples: Examples, rows: np.ndarray) -> tuple[int, int]:
    """Peak bytes on the device of forward and backward of the longest row, and of it twice. Nothing of it stays."""
    found = []
    training = model.training
    with torch.random.fork_rng([torch.cuda.current_device()]):
        model.train()
        for count in (1, 2):
            torch.cuda.reset_peak_memory_stats()
            accumulate(model, [examples.batch(np.repeat(rows[:1], count))], task.loss_fn)
            model.zero_grad(set_to_none=True)
            found.append(torch.cuda.max_memory_allocated())
        model.train(training)
    # The optimizer's two moments are not there yet.
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    return found[0] + 8 * held, found[1] + 8 * held
