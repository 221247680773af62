"""A training step of this project and of plain PyTorch, and functions that time contenders in turns."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

LR, DECAY, CLIP = 1e-4, 0.01, 1.0
Calls = Mapping[str, Callable[[], Any]]


def engine_step(model: Any, batch: dict[str, Any], optimizer_class: Any = None) -> Callable[[], Any]:
    """Forward, backward, clipping and an optimizer of the engine (None: AdamOptimizer). A call returns the loss.

    Dropout draws by step and row, as in training, if `batch` has row_ids.
    """
    import engine
    import modelcenter as mc

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = (optimizer_class or engine.optim.AdamOptimizer)(trained, lr=LR, weight_decay=DECAY)
    manager = engine.optim.OptimManager()
    manager.add_optimizer(optimizer)
    count = itertools.count()

    def step() -> Any:
        manager.zero_grad()
        with engine.ops.dropout_key(0, next(count)):
            loss = mc.training.accumulate(model, [batch], backward=manager.backward)
        manager.clip_grad_norm(optimizer.param_groups, CLIP, defer=True)
        manager.step()
        return loss

    return step


def torch_step(model: Any, loss_of: Callable[[], Any]) -> Callable[[], Any]:
    """The same with loss.backward(), clip_grad_norm_ and fused AdamW."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=DECAY, fused=True)

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        return loss.detach()

    return step


def median_ms(calls: Calls, rounds: int, warmup: int = 2, before: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """The median milliseconds of each call. The calls take turns; `before` runs before each of them and is not
    timed."""
    return {name: statistics.median(ms[warmup:]) for name, ms in in_turns(calls, rounds + warmup, before).items()}


def best_ms(calls: Calls, rounds: int) -> dict[str, float]:
    """The lowest milliseconds of each call. The calls take turns."""
    return {name: min(ms) for name, ms in in_turns(calls, rounds).items()}


def in_turns(calls: Calls, rounds: int, before: Callable[[], Any] = lambda: None) -> dict[str, list[float]]:
    """The milliseconds of each call in each round. The calls take turns; `before` runs before each and is not timed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before()
            began = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - began))
    return times
