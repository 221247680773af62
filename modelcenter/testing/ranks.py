"""The same rows in one process or on two ranks, cut into microbatches."""

import atexit
import functools
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

import engine
from modelcenter.compare import Row, hub_gradients, pack_rows
from modelcenter.testing.reference import CHOICES


@functools.cache
def two_ranks() -> engine.testing.Pool:
    """Two gloo ranks, forked once for all tests of a process."""
    pool = engine.testing.Pool(2)
    atexit.register(pool.close)
    return pool


def accumulate_rows(
    folder: str, task: str, rows: list[Row], microbatches: int, zero_level: int, sharing: str = ""
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, whole gradients under hub names) of a saved model for rows that are dealt to the ranks.

    Args:
        microbatches: into how many each rank cuts its rows; the last rank may have fewer.
        sharing: what two ranks split of one batch: "tensor", "sequence" (both: layers), "context" or nothing.
    """
    from modelcenter.auto import from_pretrained
    from modelcenter.training import accumulate

    policy: Any = False
    if engine.is_initialized():
        sizes = {"tensor": {"tp_size": 2}, "sequence": {"tp_size": 2}, "context": {"cp_size": 2}}
        engine.init_distributed(**sizes.get(sharing, {}))
        policy = engine.Policy(zero_level=zero_level, sequence_parallel=sharing == "sequence")
    model = from_pretrained(folder, None, policy=policy)
    if sharing in ("tensor", "sequence"):
        held = sum(part.numel() for _, _, part in engine.local_slices(model))
        assert held < 0.8 * model.num_parameters(), "tp_plan splits few of the layers"
    step = CHOICES if task == "multiple-choice" else 1
    examples = [rows[i : i + step] for i in range(0, len(rows), step)][engine.data_rank() :: engine.data_size()]
    size = -(-len(examples) // microbatches)
    parts = [examples[i : i + size] for i in range(0, len(examples), size)]
    loss = accumulate(model, [pack_rows(task, [row for example in part for row in example]) for part in parts])
    held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in held.items()}
    return loss, {name: grad.clone() for name, grad in hub_gradients(model, grads).items()}
