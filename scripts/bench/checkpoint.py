"""How long saving holds up training, and what it costs in memory: asynchronous against synchronous, on 2 ranks.

    python scripts/bench/checkpoint.py [--millions 40] [--rounds 3] [--output result.json]

A model of matrices at ZeRO-3 with AdamW is saved by engine.save_checkpoint between two steps, in processes that keep
freed memory, as training does. Of each save are reported: for how long the call holds up training, how long it takes
until the checkpoint is on the disk, and how long the steps taken meanwhile are against an undisturbed one. The first
save is reported apart, for it copies into memory that is new to the process, and later ones into that of the one
before; with it goes the peak resident memory of a rank above what training has.
"""

import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


KEYS = ("first_stall_s", "stall_s", "written_s", "step_s", "step_while_writing_s", "state_mb", "peak_above_training_mb")


def resident(peak: bool) -> int:
    """Bytes of this process in memory, now or at most since `forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def rank(folder: str, millions: int, asynchronous: bool) -> dict[str, float]:
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
        """Seconds until training may go on, and until all is on the disk."""
        engine.synchronize()
        began = time.perf_counter()
        engine.save_checkpoint(Path(folder) / "checkpoint", model, manager, asynchronous=asynchronous)
        stall = time.perf_counter() - began
        engine.wait_checkpoint()
        return stall, time.perf_counter() - began

    undisturbed = min(step() for _ in range(4))
    held = sum(p.to_local().numel() for p in model.parameters()) * 4 * 3  # parameters and two moments, fp32
    manager.zero_grad()
    engine.synchronize()
    ctypes.CDLL(None).malloc_trim(0)  # or what training freed hides what saving takes
    before = resident(peak=False)
    forget_peak()
    first, _ = save()
    peak = resident(peak=True) - before
    step()
    stall, written = save()
    during = []
    if asynchronous:  # once more, with training beside it
        engine.synchronize()
        engine.save_checkpoint(Path(folder) / "checkpoint", model, manager, asynchronous=True)
        began = time.perf_counter()
        while time.perf_counter() - began < written / 2 or len(during) < 2:
            during.append(step())
        engine.wait_checkpoint()
    return {
        "first_stall_s": first,
        "stall_s": stall,
        "written_s": written,
        "step_s": undisturbed,
        "step_while_writing_s": sum(during) / len(during) if during else 0.0,
        "state_mb": held / 1e6,
        "peak_above_training_mb": peak / 1e6,
    }


def main() -> None:
    import argparse

    from scripts.bench import lib

    p = lib.parser(__doc__)
    p.add_argument("--millions", type=int, default=40, help="parameters, in millions")
    p.add_argument("--child", choices=("sync", "async"), help=argparse.SUPPRESS)
    args = lib.parse(p, millions=4)
    if args.child:
        import engine

        engine.memory.prepare_torch()
        with tempfile.TemporaryDirectory() as folder:
            ranks = engine.testing.run(rank, 2, folder, args.millions, args.child == "async", timeout=600)
        print(json.dumps({key: max(r[key] for r in ranks) for key in ranks[0]}))
        return
    contenders = {
        kind: lambda _, kind=kind: lib.child([__file__, "--child", kind, "--millions", str(args.millions)], 1)
        for kind in ("sync", "async")
    }
    results = lib.take_turns(contenders, args.rounds, args.threads)
    numbers = {kind: {key: round(lib.median(runs, key), 4) for key in KEYS} for kind, runs in results.items()}
    found, sync = numbers["async"], numbers["sync"]
    numbers["stall_of_async_over_sync"] = round(found["stall_s"] / sync["stall_s"], 4)
    whats = {"first_stall_s": "stall of training by the first save", "stall_s": "stall of training by a save"}
    rows = [
        *(lib.against(what, "synchronous saving", found[key], sync[key], "s") for key, what in whats.items()),
        lib.against("a step beside a save", "an undisturbed step", found["step_while_writing_s"], found["step_s"], "s",
                    why="writing takes cores and memory bandwidth from training"),
    ]  # fmt: skip
    lib.finish(args, "checkpoint", numbers, rows, ranks=2)


if __name__ == "__main__":
    main()
