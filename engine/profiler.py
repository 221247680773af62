"""A trace of some steps of training, one file per rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, schedule
from torch.profiler import profile as torch_profile

from engine import runtime


@contextmanager
def profile(
    directory: str | os.PathLike[str], wait: int = 1, warmup: int = 1, active: int = 3, memory: bool = False
) -> Iterator[torch_profile]:
    """Record ``active`` steps after ``wait`` + ``warmup`` others, and write ``directory``/trace-rank-00000.json.

    ::

        with engine.profile("traces") as profiler:
            for batch in batches:
                ...
                profiler.step()

    The file opens in https://ui.perfetto.dev or chrome://tracing. Not collective: a rank may profile alone.

    Args:
        memory: also record allocations.

    Raises:
        ValueError: a number of steps is out of range.
    """
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    file = target / f"trace-rank-{runtime.rank():05d}.json"
    written = False

    def write(profiler: torch_profile) -> None:
        nonlocal written
        part = file.with_suffix(".partial")
        profiler.export_chrome_trace(str(part))
        os.replace(part, file)
        written = True

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    with torch_profile(activities=activities, schedule=plan, on_trace_ready=write, profile_memory=memory) as profiler:
        yield profiler
    if not written:
        warnings.warn(
            f"no trace in {target}: the loop ended before step {wait + warmup + 1} (profiler.step() ends a step)",
            stacklevel=3,
        )
