"""One training step on gloo ranks: this engine's sharding against PyTorch's own, by hand.

The same GPT-2-like model (this project's, so that only the engine differs), fp32, packed tokens, clipping and AdamW.
Contenders live in the same processes and take turns step by step.

    python scripts/bench/sharded_step.py --output result.json

ZeRO-3 is compared with fully_shard on each block, clip_grad_norm_ and fused AdamW; ZeRO-2, which keeps whole
parameters between forward and backward, with DistributedDataParallel and the same.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import finish, parser


def main() -> None:
    p = parser(__doc__, rounds=30)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--hidden_size", type=int, default=256)
    p.add_argument("--tokens", type=int, default=512, help="on each rank")
    args = p.parse_args()
    import engine

    times = engine.testing.run(measure, args.ranks, args, timeout=900)[0]
    medians = {name: statistics.median(found) for name, found in times.items()}
    numbers = {
        "milliseconds": {name: round(1000 * value, 2) for name, value in medians.items()},
        "zero3_over_fully_shard": round(medians["fully_shard"] / medians["zero3"], 3),
        "zero2_over_ddp": round(medians["zero2"] / medians["ddp"], 3),
        "zero1_over_ddp": round(medians["zero1"] / medians["ddp"], 3),
    }
    finish(args, "sharded_step", numbers, vars(args))


def measure(args: Any) -> dict[str, list[float]]:
    """Seconds of each step of each contender, on this rank."""
    import torch
    import torch.distributed as dist

    import engine

    torch.set_num_threads(1)
    engine.memory.keep_freed_memory()
    engine.init_distributed()
    rng = torch.Generator().manual_seed(engine.rank())
    ids = torch.randint(1, 2048, (1, args.tokens), generator=rng)
    ends = torch.arange(0, args.tokens + 1, 64, dtype=torch.int32)
    batch = {"input_ids": ids, "labels": ids, "cu_seqlens": ends, "max_seqlen": 64}
    contenders = {
        "zero3": ours(args, batch, 3),
        "fully_shard": by_hand(args, batch, sharded=True),
        "zero2": ours(args, batch, 2),
        "zero1": ours(args, batch, 1),
        "ddp": by_hand(args, batch, sharded=False),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(args.rounds + 3):
        for name, step in contenders.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            if turn >= 3:
                times[name].append(time.perf_counter() - began)
    return times


def build(args: Any, policy: Any) -> Any:
    import modelcenter as mc

    shape = {"n_embd": args.hidden_size, "n_layer": args.layers, "n_head": args.hidden_size // 64, "n_positions": 512}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = {"model_type": "gpt2", "vocab_size": 2048, **shape, **none}
    return mc.from_config(config, "causal-lm", policy=policy).train()


def ours(args: Any, batch: dict[str, Any], level: int) -> Any:
    import engine
    import modelcenter as mc

    model = build(args, engine.Policy(zero_level=level))
    optimizer = engine.optim.AdamOptimizer(model.parameters(), lr=1e-4, weight_decay=0.01)
    manager = engine.optim.OptimManager()
    manager.add_optimizer(optimizer)

    def step() -> None:
        manager.zero_grad()
        mc.training.accumulate(model, [batch], backward=manager.backward)
        manager.clip_grad_norm(optimizer.param_groups, 1.0, defer=True)
        manager.step()

    return step


def by_hand(args: Any, batch: dict[str, Any], sharded: bool) -> Any:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = build(args, False)
    if sharded:
        for block in model.layers:
            fully_shard(block)
        run = fully_shard(model)
    else:
        run = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        run(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
