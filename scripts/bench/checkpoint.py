"""How long saving a checkpoint holds up training, and what it costs in memory: asynchronous compared with synchronous.

    python scripts/bench/checkpoint.py [--millions 40] [--rounds 3] [--output result.json]

Two ranks save a model of matrices at ZeRO-3 with AdamW by engine.save_checkpoint between two steps, in processes that
keep freed memory, as training does. Three times are reported for each save: how long the call holds up training, how
long until the checkpoint is on the disk, and how long the steps during it take compared with an undisturbed one. The
first save is reported separately, because it copies into new memory, which later saves reuse; the peak resident memory
of a rank above that of training is measured with it.
"""

import argparse
import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, median, parse, parser, take_turns

KEYS = ("first_stall_s", "stall_s", "written_s", "step_s", "step_while_writing_s", "state_mb", "peak_above_training_mb")


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--millions", type=int, default=40, help="parameters, in millions (default: 40)")
    p.add_argument("--child", choices=("sync", "async"), help=argparse.SUPPRESS)
    args = parse(p, millions=4)
    if args.child:
        measure(args.millions, args.child == "async")
        return
    contenders = {
        kind: lambda _, kind=kind: child([__file__, "--child", kind, "--millions", str(args.millions)], 1)
        for kind in ("sync", "async")
    }
    results = take_turns(contenders, args.rounds, args.threads)
    numbers: dict[str, Any] = {
        kind: {key: round(median(runs, key), 4) for key in KEYS} for kind, runs in results.items()
    }
    ours, sync = numbers["async"], numbers["sync"]
    numbers["stall_of_async_over_sync"] = round(ours["stall_s"] / sync["stall_s"], 4)
    stalls = {"first_stall_s": "stall of training by the first save", "stall_s": "stall of training by a save"}
    rows = [
        *(against(what, "synchronous saving", ours[key], sync[key], "s") for key, what in stalls.items()),
        against("a step beside a save", "an undisturbed step", ours["step_while_writing_s"], ours["step_s"], "s",
                why="writing takes cores and memory bandwidth from training"),
    ]  # fmt: skip
    finish(args, "checkpoint", numbers, rows, ranks=2)


def measure(millions: int, asynchronous: bool) -> None:
    """Print the larger of the two ranks' numbers."""
    import engine

    engine.memory.prepare_torch()
    with tempfile.TemporaryDirectory() as folder:
        ranks = engine.testing.run(measure_rank, 2, folder, millions, asynchronous, timeout=600)
    print(json.dumps({key: max(r[key] for r in ranks) for key in ranks[0]}))


def measure_rank(folder: str, millions: int, asynchronous: bool) -> dict[str, float]:
    import torch

    import engine

    engine.memory.keep_freed_memory()
    engine.init_distributed(zero_level=3)
    width = 1024
    blocks = [torch.nn.Linear(width, width, bias=False) for _ in range(max(1, millions * 1_000_000 // width**2))]
    model = engine.shard(torch.nn.Sequential(*blocks), units=blocks)
    manager = engine.optim.OptimManager()
    manager.add_optimizer(engine.optim.AdamOptimizer(model.parameters(), lr=1e-4))
    x = torch.randn(8, width)

    def step() -> float:
        began = time.perf_counter()
        manager.zero_grad()
        manager.backward(model(x).square().mean())
        manager.step()
        return time.perf_counter() - began

    def save() -> tuple[float, float]:
        """(seconds until training may continue, seconds until everything is on the disk)"""
        engine.synchronize()
        began = time.perf_counter()
        engine.save_checkpoint(Path(folder) / "checkpoint", model, manager, asynchronous=asynchronous)
        stall = time.perf_counter() - began
        engine.wait_checkpoint()
        return stall, time.perf_counter() - began

    def agreed(condition: bool) -> bool:
        """Rank 0's condition, because all ranks must take the same number of steps."""
        decision = torch.tensor(int(condition))
        torch.distributed.broadcast(decision, 0)
        return bool(decision)

    undisturbed = min(step() for _ in range(4))
    state = sum(p.to_local().numel() for p in model.parameters()) * 4 * 3  # parameters and two moments, fp32
    manager.zero_grad()
    engine.synchronize()
    ctypes.CDLL(None).malloc_trim(0)  # memory that training freed would hide what saving takes
    before = resident(peak=False)
    forget_peak()
    first, _ = save()
    peak = resident(peak=True) - before
    step()
    stall, written = save()
    during: list[float] = []
    if asynchronous:  # once more, with training beside it
        engine.synchronize()
        engine.save_checkpoint(Path(folder) / "checkpoint", model, manager, asynchronous=True)
        began = time.perf_counter()
        while agreed(time.perf_counter() - began < written / 2 or len(during) < 2):
            during.append(step())
        engine.wait_checkpoint()
    return {
        "first_stall_s": first,
        "stall_s": stall,
        "written_s": written,
        "step_s": undisturbed,
        "step_while_writing_s": sum(during) / len(during) if during else 0.0,
        "state_mb": state / 1e6,
        "peak_above_training_mb": peak / 1e6,
    }


def resident(peak: bool) -> int:
    """Bytes of this process in memory, now or at most since `forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
