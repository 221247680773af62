"""A training step, here and by PyTorch's own means, and steps in turns: what several benchmarks time."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

LR, DECAY, CLIP = 1e-4, 0.01, 1.0


def here(model: Any, batch: dict[str, Any], kind: Any = None) -> Callable[[], Any]:
    """Forward, backward, clipping and an optimizer of the engine (None: AdamOptimizer); a call returns the loss."""
    import engine
    import modelcenter as mc

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = (kind or engine.optim.AdamOptimizer)(trained, lr=LR, weight_decay=DECAY)
    manager = engine.optim.OptimManager()
    manager.add_optimizer(optimizer)

    def step() -> Any:
        manager.zero_grad()
        loss = mc.training.accumulate(model, [batch], backward=manager.backward)
        manager.clip_grad_norm(optimizer.param_groups, CLIP, defer=True)
        manager.step()
        return loss

    return step


def by_torch(model: Any, loss_of: Callable[[], Any]) -> Callable[[], Any]:
    """The same by loss.backward(), clip_grad_norm_ and fused AdamW."""
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


def in_turns(
    steps: Mapping[str, Callable[[], Any]], rounds: int, warm: int = 2, before: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Median milliseconds of each step; the first `warm` rounds do not count; `before` runs untimed before each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + warm):
        for name, step in steps.items():
            before()
            began = time.perf_counter()
            step()
            if turn >= warm:
                times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(found) for name, found in times.items()}
