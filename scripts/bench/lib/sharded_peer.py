"""A contender of sharded_step.py under torchrun: accelerate's FSDP2, DeepSpeed or this engine, on the same model and
batches.

Usage: torchrun ... scripts/bench/lib/sharded_peer.py NAME SHAPE, with SHAPE as JSON. Prints the median milliseconds of
a step, and the class that wraps the model, because accelerate on a CPU replaces FSDP2 by DistributedDataParallel.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.lib import steps
from scripts.bench.sharded_step import batch_of, build, ours


def accelerate_step(model: Any, batch: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.layers[0]).__name__],
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    run, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(run(**batch)["loss"])
        accelerator.clip_grad_norm_(run.parameters(), 1.0)
        optimizer.step()

    return run, step


def deepspeed_step(model: Any, batch: dict[str, Any], level: int) -> tuple[Any, Callable[[], None]]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": level},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01, "torch_adam": True}},
    }
    run, *_ = deepspeed.initialize(model=model, config=settings)

    def step() -> None:
        run.backward(run(**batch)["loss"])
        run.step()

    return run, step


def ours_step(shape: argparse.Namespace, level: int) -> Callable[[], None]:
    import engine

    engine.memory.keep_freed_memory()
    engine.init_distributed(device="cpu")
    step: Callable[[], None] = ours(shape, batch_of(shape, engine.rank()), level)
    return step


def main() -> None:
    name, shape = sys.argv[1], argparse.Namespace(**json.loads(sys.argv[2]))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if name.startswith("modelcenter"):
        import engine

        engine.memory.prepare_torch()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    batch = batch_of(shape, int(os.environ["RANK"]))
    made: Any
    if name.startswith("modelcenter"):
        made, step = None, ours_step(shape, int(name[-1]))
    elif name.startswith("accelerate"):
        made, step = accelerate_step(build(shape, False), batch)
    else:
        made, step = deepspeed_step(build(shape, False), batch, int(name[-1]))
    ms = steps.median_ms({name: step}, shape.rounds, warmup=3, before=dist.barrier)[name]
    if dist.get_rank() == 0:
        print(json.dumps({"ms": ms, "made": type(made).__name__}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
