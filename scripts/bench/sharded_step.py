"""One training step on several ranks: this engine's sharding, compared with hand-written loops on PyTorch's own.

All contenders train the same GPT-2-like model (this project's, so that only the engine differs) in fp32 on packed
tokens, with clipping and AdamW. One further contender is transformers' model of the same shape on the same tokens,
which a hand-written loop would most likely shard. Contenders take turns, step by step, in the same
processes.

    python scripts/bench/sharded_step.py --output result.json
    python scripts/bench/sharded_step.py --device cuda     # over NCCL, on all GPUs of the machine

ZeRO-3 is compared with fully_shard on each block (PyTorch's FSDP2), clip_grad_norm_ and fused AdamW; ZeRO-2, which
keeps whole parameters between forward and backward, with DistributedDataParallel and the same clipping and optimizer.
--peers adds accelerate's FSDP2 and DeepSpeed's ZeRO-2 and 3, each in separate processes, just after processes of this
engine; DeepSpeed is installed from PyPI into a separate environment. On a CPU accelerate always creates
DistributedDataParallel; the JSON records the class. On GPUs the model is larger, because a small one would only measure
kernel launches.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import ROOT, against, child, environments, finish, gpu, parse, parser, steps

CONTENDERS = ("zero3", "fully_shard", "fully_shard_transformers", "zero2", "zero1", "ddp")
ROW = 64
DDP = "DistributedDataParallel"
SHAPE = {
    "cpu": {"layers": 4, "hidden_size": 256, "tokens": 512},
    "cuda": {"layers": 12, "hidden_size": 1024, "tokens": 8192},
}
# ZeRO level, peer, its key, the target ratio of times on each device, and why it may be missed.
_OVERHEAD = "a step also gathers the parameters, and FSDP's hooks are Python at every unit"
_SAME_ARITHMETIC = "most of a step is the arithmetic, which is the same"
AGAINST: tuple[tuple[int, str, str, dict[str, float], str], ...] = (
    (3, "fully_shard by hand (FSDP2)", "fully_shard", {"cpu": 1.2}, _SAME_ARITHMETIC),
    (3, "the same, transformers' GPT-2", "fully_shard_transformers", {}, ""),
    (2, DDP, "ddp", {"cpu": 1 / 1.25, "cuda": 1 / 1.1}, _OVERHEAD),
    (1, DDP, "ddp", {}, _OVERHEAD),
)
PEERS = {
    "accelerate FSDP2": 3,
    "DeepSpeed ZeRO-2": 2,
    "DeepSpeed ZeRO-3": 3,
}  # the ZeRO level of each


def main() -> None:
    p = parser(__doc__, rounds=30)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    p.add_argument(
        "--ranks", type=int, nargs="+", help="numbers of ranks (default: 2 and 4; on GPUs as many as there are)"
    )
    p.add_argument("--layers", type=int, help="(default: 4; on GPUs 12)")
    p.add_argument("--hidden_size", type=int, help="(default: 256; on GPUs 1,024)")
    p.add_argument("--tokens", type=int, help="tokens on each rank (default: 512; on GPUs 8,192)")
    p.add_argument("--peers", action="store_true", help="also measure accelerate and DeepSpeed, on CPUs")
    p.add_argument("--child", help=argparse.SUPPRESS)
    args = parse(p, ranks=[2], hidden_size=64, layers=2, tokens=128)
    for name, value in SHAPE[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.child:
        run_child(args)
        return
    args.ranks = args.ranks or ([2, 4] if args.device == "cpu" else [gpus()])
    if args.device == "cuda" and not 2 <= max(args.ranks) <= gpus():
        p.error(
            f"--device cuda --ranks {max(args.ranks)}: needs 2 ranks or more and a GPU for each; found {gpus()} GPUs"
        )
    shape = {name: getattr(args, name) for name in ("layers", "hidden_size", "tokens", "rounds")}
    numbers: dict[str, Any] = {}
    rows, notes = [], []
    for ranks in args.ranks:
        measured = measure_in_child(ranks, args.device, shape)
        ms = {name: round(measured[name], 2) for name in CONTENDERS}
        for level, rival, key, targets, why in AGAINST:
            what, target = f"step at ZeRO-{level}, {ranks} ranks", targets.get(args.device)
            rows.append(against(what, rival, ms[f"zero{level}"], ms[key], "ms", target, why))
        numbers[f"{ranks} ranks"] = {"milliseconds": ms}
        for name, level in PEERS.items() if args.peers else ():
            # Alone, like the peer: in turns with other contenders, a step also starts with cold caches.
            own = measure_peer(f"modelcenter ZeRO-{level}", ranks, shape)["ms"]
            result = measure_peer(name, ranks, shape)
            numbers[f"{ranks} ranks"][name] = {**result, "own_ms": own}
            if "ms" in result:
                what = f"step at ZeRO-{level}, {ranks} ranks, alone"
                why = "on a CPU it shards nothing, and so gathers nothing" if result["made"] == DDP else ""
                rows.append(against(what, f"{name} ({result['made']})", round(own, 2), result["ms"], "ms", why=why))
            else:
                notes.append(f"{name} on {ranks} ranks does not run here: {result['failed']}")
    finish(args, "sharded_step", numbers, rows, notes, packages=packages(args.peers))


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def measure_in_child(ranks: int, device: str, shape: dict[str, Any]) -> dict[str, float]:
    """The median milliseconds of each contender's step, from separate processes."""
    words = [__file__, "--child", str(ranks), "--device", device]
    words += [str(x) for name, value in shape.items() for x in (f"--{name}", value)]
    if device == "cuda":
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *words]
    return child(words, 1)


def run_child(args: Any) -> None:
    """Measure as one of torchrun's ranks, or on ranks forked from this process, and print the result."""
    import engine

    launched = "RANK" in os.environ
    result = measure(args) if launched else engine.testing.run(measure, int(args.child), args, timeout=900)[0]
    if engine.rank() == 0:
        print(json.dumps(result), flush=True)


def measure_peer(name: str, ranks: int, shape: dict[str, Any]) -> dict[str, Any]:
    """{"ms": median of a step, "made": the class that wraps the model}, or {"failed": why it does not run here}."""
    python = environments.python_of("deepspeed") if name.startswith("DeepSpeed") else sys.executable
    script = str(ROOT / "scripts" / "bench" / "lib" / "sharded_peer.py")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), script, name]
    try:
        result = child([*words, json.dumps(shape)], 1, python, timeout=600)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if "Error" in line and "ChildFailed" not in line]
        return {"failed": (lines or [str(error)[:200]])[-1].strip()[:300]}
    return {key: result[key] for key in ("ms", "made")}


def packages(with_peers: bool) -> dict[str, str]:
    return environments.versions(environments.python_of("deepspeed"), "deepspeed", "accelerate") if with_peers else {}


def measure(args: Any) -> dict[str, float]:
    """The median milliseconds of a step of each contender, on this rank."""
    import engine

    engine.memory.prepare_torch()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    engine.memory.keep_freed_memory()
    engine.init_distributed(device=args.device)
    batch = batch_of(args, engine.rank())
    there = {name: value.to(engine.device()) if hasattr(value, "to") else value for name, value in batch.items()}
    contenders = {
        "zero3": ours(args, batch, 3),
        "fully_shard": by_hand(args, there, sharded=True),
        "fully_shard_transformers": of_transformers(args, there),
        "zero2": ours(args, batch, 2),
        "zero1": ours(args, batch, 1),
        "ddp": by_hand(args, there, sharded=False),
    }
    return steps.median_ms(gpu.synchronised(contenders, args.device), args.rounds, warmup=3, before=dist.barrier)


def batch_of(args: Any, rank: int) -> dict[str, Any]:
    """Packed rows of ROW tokens; each rank has another batch."""
    import torch

    ids = torch.randint(1, 2048, (1, args.tokens), generator=torch.Generator().manual_seed(rank))
    ends = torch.arange(0, args.tokens + 1, ROW, dtype=torch.int32)
    return {"input_ids": ids, "labels": ids, "cu_seqlens": ends, "max_seqlen": ROW}


def config_of(args: Any) -> dict[str, Any]:
    shape = {"n_embd": args.hidden_size, "n_layer": args.layers, "n_head": args.hidden_size // 64, "n_positions": 512}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {"vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 0, **shape, **none}


def build(args: Any, policy: Any) -> Any:
    import modelcenter as mc

    return mc.from_config({"model_type": "gpt2", **config_of(args)}, "causal-lm", policy=policy).train()


def ours(args: Any, batch: dict[str, Any], level: int) -> Any:
    import engine

    model = build(args, engine.Policy(zero_level=level))
    return steps.engine_step(model, batch)


def by_hand(args: Any, batch: dict[str, Any], sharded: bool) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model = build(args, False).to(batch["input_ids"].device)
    run = fully_sharded(model, model.layers) if sharded else DistributedDataParallel(model)
    return steps.torch_step(model, lambda: run(**batch)["loss"])


def of_transformers(args: Any, batch: dict[str, Any]) -> Any:
    """transformers' model of this shape on the same rows, which have equal lengths, so none is padded."""
    import torch
    import transformers

    torch.manual_seed(0)
    rows = batch["input_ids"].view(-1, ROW)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config_of(args))).train().to(rows.device)
    run = fully_sharded(model, model.transformer.h)
    return steps.torch_step(model, lambda: run(input_ids=rows, labels=rows).loss)


def fully_sharded(model: Any, blocks: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


if __name__ == "__main__":
    main()
