"""What an optimizer step costs on the CPU: the fused operators against torch's, DeepSpeed's and the memory itself.

    python scripts/bench/optimizer.py [--millions 40] [--rounds 3] [--output result.json]

In each round a process times all contenders in turn and keeps the best of several runs of each; the medians over the
rounds are reported. The ceiling is torch's in-place `add_`, which reads and writes each byte once; the GB/s of a step
count the bytes that it has to read and write at least. DeepSpeed's CPUAdam is measured too where it is installed:
--peers installs it from PyPI into an environment of its own.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# Bytes that a step reads and writes for each parameter.
BYTES = {
    "add_": 8, "torch_fp32": 28, "fp32": 28, "fp32_clip_unscale_skip": 32, "bf16_master": 28, "bf16_composed_torch": 28,
    "bf16_remainder": 26, "bf16_remainder_bf16_moments": 18, "bf16_random": 22, "lion_fp32": 20, "norm": 4,
    "torch_norm": 4, "bf16_8bit": 14, "deepspeed_fp32": 28, "deepspeed_bf16": 22,
}  # fmt: skip


def contenders(millions: int) -> dict:
    import torch

    from engine.ops import fused

    torch.manual_seed(0)
    each, count = 4_000_003, max(1, millions // 4)
    f32, bf16 = torch.float32, torch.bfloat16

    def tensors(dtype: torch.dtype = f32, fill: float | None = 0.0) -> list:
        return [(torch.randn(each) if fill is None else torch.full((each,), fill)).to(dtype) for _ in range(count)]

    p, g, m, v = tensors(fill=None), tensors(fill=None), tensors(), tensors()
    half, half_g, low = tensors(bf16), tensors(bf16, None), tensors(torch.int16)
    half_m, half_v = tensors(bf16), tensors(bf16)
    steps = [torch.zeros(()) for _ in range(count)]
    codes = [[torch.zeros(each, dtype=torch.uint8) for _ in range(count)] for _ in range(2)]
    scales = [[torch.zeros(-(-each // 128)) for _ in range(count)] for _ in range(2)]
    settings = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    norm_sq, one = torch.zeros((), dtype=torch.float64), torch.ones(())
    norm, gscale, found = one.clone(), one.clone(), torch.zeros(())
    places = [x for i in range(count) for x in (i, each, each, 0)]

    def torchs(gradients: list, values: list) -> None:
        torch._fused_adamw_(
            values, gradients, m, v, [], steps, amsgrad=False, lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01,
            eps=1e-8, maximize=False,
        )  # fmt: skip

    def with_clip() -> None:
        fused.grad_norm_sq(g, norm_sq)
        fused.clip_coef_(norm_sq, 1.0, norm, gscale, found, loss_scale=one)
        fused.adamw_(p, g, m, v, steps, gscale=gscale, found_inf=found, **settings)

    def composed() -> None:
        raised = [x.float() for x in half_g]
        torch._foreach_mul_(raised, one)
        torchs(raised, p)
        torch._foreach_copy_(half, p)

    def step(parameters: list, gradients: list, aux: list, mode: str, first: list, second: list, **more: object):
        return lambda: fused.adamw_(
            parameters, gradients, first, second, steps, aux, mode=mode, gscale=one, found_inf=None, **settings, **more
        )

    made = {
        "add_": lambda: [x.add_(1e-7) for x in p],
        "torch_fp32": lambda: torchs(g, p),
        "fp32": lambda: fused.adamw_(p, g, m, v, steps, **settings),
        "fp32_clip_unscale_skip": with_clip,
        "bf16_master": step(half, half_g, p, "master", m, v),
        "bf16_composed_torch": composed,
        "bf16_remainder": step(half, half_g, low, "remainder", m, v),
        "bf16_remainder_bf16_moments": step(half, half_g, low, "remainder", half_m, half_v),
        "bf16_random": step(half, half_g, [], "random", m, v, places=places),
        "bf16_8bit": lambda: fused.adamw8_(
            half,
            half_g,
            *codes,
            *scales,
            steps,
            low,
            widths=[each] * count,
            places=places,
            mode="remainder",
            gscale=one,
            **settings,
        ),
        "lion_fp32": lambda: fused.lion_(p, g, m, steps, lr=1e-5, weight_decay=0.1),
        "norm": lambda: fused.grad_norm_sq(g, norm_sq),
        "torch_norm": lambda: torch._foreach_norm(g),
    }
    if importlib.util.find_spec("deepspeed") is None:
        return made
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    for name, values, gradients in (("deepspeed_fp32", p, g), ("deepspeed_bf16", half, half_g)):
        parameters = [torch.nn.Parameter(x) for x in values]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        made[name] = DeepSpeedCPUAdam(parameters, lr=1e-4, weight_decay=0.01).step
    return made


SMALL = ("plain", "sharded", "torch")


def small(kind: str) -> Callable[[], None]:
    """Clip and step of 400 matrices of 16 x 16, plain or sharded (over one rank, which costs what any number does)."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from engine.optim import AdamOptimizer, OptimManager

    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(400)))
    if kind == "sharded":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(torch.randn(4, 16)).sum().backward()
    parameters = list(model.parameters())
    assert hasattr(parameters[0], "placements") == (kind == "sharded")
    if kind == "torch":
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    else:
        ours, manager = AdamOptimizer(parameters, lr=1e-4), OptimManager()
        manager.add_optimizer(ours)

        def step() -> None:
            manager.clip_grad_norm(ours.param_groups, 1.0, defer=True)
            manager.step()

    return step


def timed(made: dict, runs: int) -> dict[str, float]:
    best = dict.fromkeys(made, float("inf"))
    for _ in range(runs):
        for name, call in made.items():
            began = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - began)
    return {name: 1000 * seconds for name, seconds in best.items()}


def main() -> None:
    import argparse

    from scripts.bench import lib
    from scripts.bench.lib import peers

    p = lib.parser(__doc__)
    p.add_argument("--millions", type=int, default=40, help="parameters, in millions")
    p.add_argument("--peers", action="store_true", help="measure DeepSpeed too, in an environment made from PyPI")
    p.add_argument("--child", help=argparse.SUPPRESS)
    args = lib.parse(p, millions=4)
    if args.child:
        from engine.ops import library

        if args.child == "large":
            best = timed(contenders(args.millions), 7)
        else:
            best = timed({kind: small(kind) for kind in SMALL}, 300)
        print(json.dumps({**best, "library": library.cpu().what}))
        return
    python = peers.python_of("deepspeed") if args.peers else sys.executable
    packages = peers.versions(python, "deepspeed")
    turns = {
        kind: lambda _, kind=kind: lib.child(
            [__file__, "--child", kind, "--millions", str(args.millions)], args.threads, python
        )
        for kind in ("large", "small")
    }
    results = lib.take_turns(turns, args.rounds, args.threads)
    large = {name: lib.median(results["large"], name) for name in BYTES if name in results["large"][0]}
    parameters = 4_000_003 * max(1, args.millions // 4)
    rate = {name: BYTES[name] * parameters / ms / 1e6 for name, ms in large.items()}
    plain, sharded, torchs = (lib.median(results["small"], kind) for kind in SMALL)
    ratios = {
        "fp32_of_the_ceiling": rate["fp32"] / rate["add_"],
        "bf16_master_of_the_ceiling": rate["bf16_master"] / rate["add_"],
        "fp32_speed_over_torch": large["torch_fp32"] / large["fp32"],
        "bf16_speed_over_composed_torch": large["bf16_composed_torch"] / large["bf16_master"],
        "time_of_clip_unscale_skip_over_bare": large["fp32_clip_unscale_skip"] / large["fp32"],
        "small_sharded_over_plain": sharded / plain,
        "small_torch_over_ours": torchs / plain,
    }
    for dtype, ours in (("fp32", "fp32"), ("bf16", "bf16_master")):
        if f"deepspeed_{dtype}" in large:
            ratios[f"{dtype}_speed_over_deepspeed"] = large[f"deepspeed_{dtype}"] / large[ours]
    numbers = {
        "ms": {name: round(ms, 3) for name, ms in large.items()},
        "gb_per_s": {name: round(value, 2) for name, value in rate.items()},
        "small_ms": {"plain": round(plain, 3), "sharded": round(sharded, 3), "torch": round(torchs, 3)},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "library": results["large"][0]["library"].rpartition("(")[2].rstrip(")"),
    }
    step = "optimizer step, {}".format
    rows = [
        lib.against(step("fp32"), "torch, fused", large["fp32"], large["torch_fp32"], "ms"),
        lib.against(step("bf16 with masters"), "torch, composed", large["bf16_master"], large["bf16_composed_torch"],
                    "ms"),
        lib.against(step("400 small matrices"), "torch, fused", plain, torchs, "ms"),
        lib.against(step("400 small matrices, sharded"), "the same, plain", sharded, plain, "ms", 1 / 1.1,
                    why="a shard costs Python that a plain tensor does not"),
        lib.fraction(step("fp32"), ratios["fp32_of_the_ceiling"], "bandwidth of torch's add_"),
        lib.fraction(step("bf16 with masters"), ratios["bf16_master_of_the_ceiling"], "bandwidth of torch's add_"),
    ]  # fmt: skip
    bandwidth = "both go at the memory's speed"
    fewer = f"{bandwidth}, and it moves 22 bytes a parameter: it keeps no masters, so small updates are rounded away"
    for what, ours, theirs, why in (
        ("fp32", "fp32", "deepspeed_fp32", bandwidth),
        ("bf16 with masters", "bf16_master", "deepspeed_bf16", fewer),
        ("bf16 with masters as remainders", "bf16_remainder", "deepspeed_bf16", fewer),
    ):
        if theirs in large:
            rows.append(lib.against(step(what), "DeepSpeed's CPUAdam", large[ours], large[theirs], "ms", 1.1, why))
    lib.finish(args, "optimizer", numbers, rows, packages=packages, parameters=parameters)


if __name__ == "__main__":
    main()
