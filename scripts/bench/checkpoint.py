"""How long saving a checkpoint holds up training, and what it costs in memory, compared with PyTorch's own saving.

    python scripts/bench/checkpoint.py [--millions 160] [--rounds 3] [--pause 8] [--output result.json]

Two ranks save a model of matrices at ZeRO-3 with AdamW between two steps: by engine.save_checkpoint, and by
torch.distributed.checkpoint (DCP) from fully_shard and torch.optim.AdamW; each asynchronously and synchronously, in
processes that keep freed memory, as training does. Three times are reported for each save: how long the call holds up
training, how long until the checkpoint is on the disk and the previous one removed, and how much longer the steps
during it take than undisturbed ones, all together. The first save is reported separately, because it copies into new
memory, which later saves reuse; the peak resident memory of a rank above that of training is measured with it.

Before each save the ranks pause: between two saves of a training run a virtual machine gives free memory back to its
host, and the page cache has to get it again.
"""

import argparse
import ctypes
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, median, parse, parser, take_turns

KEYS = ("first_stall_s", "stall_s", "written_s", "step_s", "slower_steps_s", "state_mb", "peak_above_training_mb")
KINDS = ("async", "sync", "dcp async", "dcp sync")
WIDTH = 1024


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--millions", type=int, default=160, help="parameters, in millions (default: 160)")
    p.add_argument("--pause", type=float, default=8, help="seconds before each save (default: 8)")
    p.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    args = parse(p, millions=4, pause=0)
    if args.child:
        measure(args.millions, args.pause, args.child)
        return
    flags = ["--millions", str(args.millions), "--pause", str(args.pause)]
    contenders = {kind: lambda _, kind=kind: child([__file__, "--child", kind, *flags], 1) for kind in KINDS}
    results = take_turns(contenders, args)
    numbers: dict[str, Any] = {
        kind: {key: round(median(runs, key), 4) for key in KEYS} for kind, runs in results.items()
    }
    ours, sync, dcp, dcp_sync = (numbers[kind] for kind in KINDS)
    numbers["stall_of_async_over_sync"] = round(ours["stall_s"] / sync["stall_s"], 4)
    asynchronous, synchronous = "DCP's async_save", "DCP's save"
    hashes = "it does not hash what it writes: half a second of a core per GB"
    rows = [
        against("stall of training by the first save", asynchronous, ours["first_stall_s"], dcp["first_stall_s"], "s"),
        against("stall of training by a save", asynchronous, ours["stall_s"], dcp["stall_s"], "s"),
        against("stall of training by a save", "synchronous saving", ours["stall_s"], sync["stall_s"], "s"),
        against("steps beside a save: what they take longer", asynchronous, ours["slower_steps_s"],
                dcp["slower_steps_s"], "s", why=hashes),
        against("a synchronous save", synchronous, sync["written_s"], dcp_sync["written_s"], "s", why=hashes),
        against("memory of an asynchronous save", asynchronous, ours["peak_above_training_mb"],
                dcp["peak_above_training_mb"], "MB"),
    ]  # fmt: skip
    finish(args, "checkpoint", numbers, rows, ranks=2)


def measure(millions: int, pause: float, kind: str) -> None:
    """Print the larger of the two ranks' numbers."""
    import engine

    engine.memory.prepare_torch()
    with tempfile.TemporaryDirectory() as folder:
        ranks = engine.testing.run(measure_rank, 2, Path(folder), millions, pause, kind, timeout=600)
    print(json.dumps({key: max(r[key] for r in ranks) for key in ranks[0]}))


def measure_rank(folder: Path, millions: int, pause: float, kind: str) -> dict[str, float]:
    import torch

    import engine
    from engine.collectives import from_rank_0

    engine.memory.keep_freed_memory()
    engine.init_distributed(zero_level=3)
    blocks = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, millions * 1_000_000 // WIDTH**2))]
    step, start = (of_dcp if kind.startswith("dcp") else of_engine)(blocks, folder, kind.endswith("async"))
    asynchronous = kind.endswith("async")

    def timed_step() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    def save() -> tuple[float, float, Callable[[], None]]:
        """(seconds until training may continue, when that began, what waits until everything is on the disk)"""
        time.sleep(pause)
        engine.synchronize()
        began = time.perf_counter()
        wait = start()
        return time.perf_counter() - began, began, wait

    undisturbed = min(timed_step() for _ in range(4))
    engine.synchronize()
    ctypes.CDLL(None).malloc_trim(0)  # memory that training freed would hide what saving takes
    before = resident(peak=False)
    forget_peak()
    first, _, wait = save()
    wait()
    peak = resident(peak=True) - before
    step()
    stall, began, wait = save()
    wait()
    written = time.perf_counter() - began
    slower = 0.0
    if asynchronous:  # once more, with training beside it
        steps = from_rank_0(2 + int(2 * written / undisturbed))  # until long after it
        step()
        _, began, wait = save()
        slower = sum(timed_step() for _ in range(steps)) - steps * undisturbed
        wait()
    return {
        "first_stall_s": first,
        "stall_s": stall,
        "written_s": written,
        "step_s": undisturbed,
        "slower_steps_s": slower,
        "state_mb": sum(block.weight.numel() for block in blocks) * 4 * 3 / 2e6,  # with two moments, fp32, half of it
        "peak_above_training_mb": peak / 1e6,
    }


def of_engine(blocks: Any, folder: Path, asynchronous: bool) -> tuple[Callable[[], None], Callable[[], Any]]:
    """(a step; what starts a save and returns what waits for it)"""
    import torch

    import engine

    model = engine.shard(torch.nn.Sequential(*blocks), units=blocks)
    manager = engine.optim.OptimManager()
    manager.add_optimizer(engine.optim.AdamOptimizer(model.parameters(), lr=1e-4))
    x = torch.randn(8, WIDTH)

    def step() -> None:
        manager.zero_grad()
        manager.backward(model(x).square().mean())
        manager.step()

    def start() -> Callable[[], None]:
        engine.save_checkpoint(folder / "checkpoint", model, manager, asynchronous=asynchronous)
        return engine.wait_checkpoint

    return step, start


def of_dcp(blocks: Any, folder: Path, asynchronous: bool) -> tuple[Callable[[], None], Callable[[], Any]]:
    """As `of_engine`, by PyTorch alone."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block)
    model: Any = fully_shard(torch.nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(8, WIDTH)
    group = dist.new_group(backend="gloo")  # the thread that saves must not mix its messages with training's
    saved: list[Path] = []

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def start() -> Callable[[], None]:
        weights, states = get_state_dict(model, optimizer)
        saved.append(folder / f"checkpoint-{len(saved)}")
        save = dcp.async_save if asynchronous else dcp.save
        future: Any = save({"model": weights, "optim": states}, checkpoint_id=saved[-1], process_group=group)

        def wait() -> None:
            if asynchronous:
                future.result()
            if dist.get_rank() == 0 and len(saved) > 1:
                shutil.rmtree(saved[-2])

        if not asynchronous:
            wait()
            return lambda: None
        return wait

    return step, start


def resident(peak: bool) -> int:
    """Bytes of this process in memory, now or at most since `forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
