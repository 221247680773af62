"""The cost of an optimizer step on the CPU: fused operators compared with torch's, DeepSpeed's and memory bandwidth.

    python scripts/bench/optimizer.py [--millions 40] [--rounds 3] [--output result.json]

In each round one process times all contenders in turn and keeps the best of several runs of each. The results are the
medians over the rounds. The ceiling is torch's in-place `add_`, which reads and writes each byte once; the GB/s of a
step count the bytes that it must at least read and write. --peers also measures DeepSpeed's CPUAdam, which it installs
from PyPI into a separate environment.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import (
    against,
    child,
    environments,
    finish,
    fraction,
    machine,
    median,
    parse,
    parser,
    steps,
    take_turns,
)

# Bytes that a step reads and writes per parameter.
BYTES = {
    "add_": 8, "torch_fp32": 28, "fp32": 28, "fp32_clip_unscale_skip": 32, "bf16_master": 28, "bf16_composed_torch": 28,
    "bf16_remainder": 26, "bf16_remainder_bf16_moments": 18, "bf16_random": 22, "lion_fp32": 20, "norm": 4,
    "torch_norm": 4, "bf16_8bit": 14, "deepspeed_fp32": 28, "deepspeed_bf16": 22,
}  # fmt: skip
TENSOR = 4_000_003  # elements of each tensor
SMALL = ("plain", "sharded", "torch")
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--millions", type=int, default=40, help="parameters, in millions (default: 40)")
    p.add_argument("--peers", action="store_true", help="also measure DeepSpeed, in an environment made from PyPI")
    p.add_argument("--child", choices=("large", "small"), help=argparse.SUPPRESS)
    args = parse(p, millions=4)
    if args.child:
        print(json.dumps({**measure(args.child, tensors_of(args.millions)), "library": machine.operator_library()}))
        return
    python = environments.python_of("deepspeed") if args.peers else sys.executable
    turns = {
        kind: lambda _, kind=kind: child(
            [__file__, "--child", kind, "--millions", str(args.millions)], args.threads, python
        )
        for kind in ("large", "small")
    }
    results = take_turns(turns, args)
    large = {name: median(results["large"], name) for name in BYTES if name in results["large"][0]}
    small = {kind: median(results["small"], kind) for kind in SMALL}
    parameters = TENSOR * tensors_of(args.millions)
    rate = {name: BYTES[name] * parameters / ms / 1e6 for name, ms in large.items()}
    ratios = ratios_of(large, small, rate)
    numbers = {
        "ms": {name: round(ms, 3) for name, ms in large.items()},
        "gb_per_s": {name: round(value, 2) for name, value in rate.items()},
        "small_ms": {kind: round(ms, 3) for kind, ms in small.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "library": results["large"][0]["library"],
    }
    packages = environments.versions(python, "deepspeed")
    finish(args, "optimizer", numbers, rows_of(large, small, ratios), packages=packages, parameters=parameters)


def ratios_of(large: Mapping[str, float], small: Mapping[str, float], rate: Mapping[str, float]) -> dict[str, float]:
    ratios = {
        "fp32_of_the_ceiling": rate["fp32"] / rate["add_"],
        "bf16_master_of_the_ceiling": rate["bf16_master"] / rate["add_"],
        "fp32_speed_over_torch": large["torch_fp32"] / large["fp32"],
        "bf16_speed_over_composed_torch": large["bf16_composed_torch"] / large["bf16_master"],
        "time_of_clip_unscale_skip_over_bare": large["fp32_clip_unscale_skip"] / large["fp32"],
        "small_sharded_over_plain": small["sharded"] / small["plain"],
        "small_torch_over_ours": small["torch"] / small["plain"],
    }
    for dtype, ours in (("fp32", "fp32"), ("bf16", "bf16_master")):
        if f"deepspeed_{dtype}" in large:
            ratios[f"{dtype}_speed_over_deepspeed"] = large[f"deepspeed_{dtype}"] / large[ours]
    return ratios


def rows_of(
    large: Mapping[str, float], small: Mapping[str, float], ratios: Mapping[str, float]
) -> list[dict[str, Any]]:
    step = "optimizer step, {}".format
    python, bandwidth = "a shard costs Python that a plain tensor does not", "both are limited by memory bandwidth"
    rows = [
        against(step("fp32"), "torch, fused", large["fp32"], large["torch_fp32"], "ms", 1.05, why=bandwidth),
        against(step("bf16 with masters"), "torch, composed", large["bf16_master"], large["bf16_composed_torch"], "ms",
                2, why=bandwidth),
        against(step("fp32, with clipping, unscaling and skipping"), "the bare step", large["fp32_clip_unscale_skip"],
                large["fp32"], "ms", 1 / 1.2, why="the norm reads the gradients once more, and reading is the limit"),
        against(step("400 small matrices"), "torch, fused", small["plain"], small["torch"], "ms"),
        against(step("400 small matrices, sharded"), "the same, plain", small["sharded"], small["plain"], "ms", 1 / 1.1,
                why=python),
        fraction(step("fp32"), ratios["fp32_of_the_ceiling"], "bandwidth of torch's add_"),
        fraction(step("bf16 with masters"), ratios["bf16_master_of_the_ceiling"], "bandwidth of torch's add_"),
    ]  # fmt: skip
    fewer = f"{bandwidth}, and it moves 22 bytes per parameter: it keeps no masters, so small updates are rounded away"
    for what, ours, theirs, why in (
        ("fp32", "fp32", "deepspeed_fp32", bandwidth),
        ("bf16 with masters", "bf16_master", "deepspeed_bf16", fewer),
        ("bf16 with masters as remainders", "bf16_remainder", "deepspeed_bf16", fewer),
        ("bf16, masters as remainders, bf16 moments", "bf16_remainder_bf16_moments", "deepspeed_bf16", bandwidth),
        ("bf16 without masters, rounded at random", "bf16_random", "deepspeed_bf16", "random bits cost arithmetic"),
    ):
        if theirs in large:
            rows.append(against(step(what), "DeepSpeed's CPUAdam", large[ours], large[theirs], "ms", 1.1, why))
    return rows


def tensors_of(millions: int) -> int:
    """The number of tensors with about this many million parameters in total."""
    return max(1, millions // 4)


def measure(kind: str, count: int) -> dict[str, float]:
    """The lowest milliseconds of each contender."""
    if kind == "large":
        return steps.best_ms(large_steps(count), 20)
    return steps.best_ms({kind: small_step(kind) for kind in SMALL}, 300)


def large_steps(count: int) -> dict[str, Callable[[], Any]]:
    """A step of each kind over `count` tensors."""
    import torch

    from engine.ops import fused

    torch.manual_seed(0)
    f32, bf16 = torch.float32, torch.bfloat16

    def tensors(dtype: torch.dtype = f32, fill: float | None = 0.0) -> list[torch.Tensor]:
        return [(torch.randn(TENSOR) if fill is None else torch.full((TENSOR,), fill)).to(dtype) for _ in range(count)]

    p, g, m, v = tensors(fill=None), tensors(fill=None), tensors(), tensors()
    half, half_g, low = tensors(bf16), tensors(bf16, None), tensors(torch.int16)
    half_m, half_v = tensors(bf16), tensors(bf16)
    counts = [torch.zeros(()) for _ in range(count)]
    codes = [[torch.zeros(TENSOR, dtype=torch.uint8) for _ in range(count)] for _ in range(2)]
    scales = [[torch.zeros(-(-TENSOR // 128)) for _ in range(count)] for _ in range(2)]
    norm_sq, one = torch.zeros((), dtype=torch.float64), torch.ones(())
    norm, gscale, found_inf = one.clone(), one.clone(), torch.zeros(())
    places = [x for i in range(count) for x in (i, TENSOR, TENSOR, 0)]

    def torch_adamw(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        torch._fused_adamw_(
            parameters, gradients, m, v, [], counts, amsgrad=False, lr=1e-4, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-8, maximize=False,
        )  # fmt: skip

    def torch_composed() -> None:
        raised = [x.float() for x in half_g]
        torch._foreach_mul_(raised, one)
        torch_adamw(p, raised)
        torch._foreach_copy_(half, p)

    def with_clipping() -> None:
        fused.grad_norm_sq(g, norm_sq)
        fused.clip_coef_(norm_sq, 1.0, norm, gscale, found_inf, loss_scale=one)
        fused.adamw_(p, g, m, v, counts, gscale=gscale, found_inf=found_inf, **SETTINGS)

    def bf16_step(
        aux: list[torch.Tensor], mode: str, first: Any = m, second: Any = v, **more: Any
    ) -> Callable[[], Any]:
        return lambda: fused.adamw_(
            half, half_g, first, second, counts, aux, mode=mode, gscale=one, found_inf=None, **SETTINGS, **more
        )

    return {
        "add_": lambda: [x.add_(1e-7) for x in p],
        "torch_fp32": lambda: torch_adamw(p, g),
        "fp32": lambda: fused.adamw_(p, g, m, v, counts, **SETTINGS),
        "fp32_clip_unscale_skip": with_clipping,
        "bf16_master": bf16_step(p, "master"),
        "bf16_composed_torch": torch_composed,
        "bf16_remainder": bf16_step(low, "remainder"),
        "bf16_remainder_bf16_moments": bf16_step(low, "remainder", half_m, half_v),
        "bf16_random": bf16_step([], "random", places=places),
        "bf16_8bit": lambda: fused.adamw8_(
            half, half_g, codes[0], codes[1], scales[0], scales[1], counts, low, widths=[TENSOR] * count,
            places=places, mode="remainder", gscale=one, **SETTINGS,
        ),
        "lion_fp32": lambda: fused.lion_(p, g, m, counts, lr=1e-5, weight_decay=0.1),
        "norm": lambda: fused.grad_norm_sq(g, norm_sq),
        "torch_norm": lambda: torch._foreach_norm(g),
        **deepspeed_steps({"deepspeed_fp32": (p, g), "deepspeed_bf16": (half, half_g)}),
    }  # fmt: skip


def deepspeed_steps(tensors: Mapping[str, tuple[list[Any], list[Any]]]) -> dict[str, Callable[[], Any]]:
    """Steps of DeepSpeed's CPUAdam over (parameters, gradients), if it is installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return {}
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    calls = {}
    for name, (values, gradients) in tensors.items():
        parameters = [torch.nn.Parameter(x) for x in values]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        calls[name] = DeepSpeedCPUAdam(parameters, lr=1e-4, weight_decay=0.01).step
    return calls


def small_step(kind: str) -> Callable[[], None]:
    """Clipping and step of 400 matrices of 16 x 16, plain or sharded (over one rank, which costs as much as over
    several)."""
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


if __name__ == "__main__":
    main()
