"""The cost of an optimizer step, clipping and dropout on a GPU, compared with the rate of a copy on the same GPU.

The benchmark measures steps over a billion fp32 parameters, as one tensor and as 2,000 tensors of odd sizes; bf16
parameters with fp32 masters; clipping and step together, here and in PyTorch (`clip_grad_norm_` and fused AdamW);
dropout of activations; and, forward and backward, norms of activations with and without an addition before them, the
gradient of a bias, activation functions, rotary positions and the loss over a vocabulary. Contenders take turns in one
process. A time is the GPU's for one of four calls that are queued behind other work, as a step is behind a backward
pass, so that the host is ahead. The host's time to launch a call (milliseconds for 2,000 tensors) is recorded as
`host_ms`; results without it were timed by the host, with four calls between two synchronisations.

    python scripts/bench/gpu_optimizer.py --output result.json
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, finish, fraction, gpu, keep, parse, parser

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CALLS = 4  # calls of one contender in a turn
STEP_BYTES = 28  # bytes that a step reads and writes per parameter, fp32 or bf16 with masters


def main() -> None:
    p = gpu.add_flags(parser(__doc__, rounds=10))
    p.add_argument("--millions", type=int, default=1000, help="parameters, in millions (default: 1000)")
    args = parse(p, millions=1)
    total = args.millions * 1_000_000
    limits = gpu.limits(args.device)
    numbers: dict[str, Any] = {"device": gpu.name(args.device), **limits}
    rows: list[dict[str, Any]] = []
    for what, sizes in (("one tensor", [total]), ("2,000 tensors", odd_sizes(total))):
        times = measured(contenders(sizes, args.device), args)
        numbers[what], ms = rounded(times), times["ms"]
        for name in ("fp32", "bf16_master"):
            rate = STEP_BYTES * total / ms[name] / 1e6
            rows.append(fraction(f"adamw_, {name}, {what}", rate / limits["copy_gb_per_s"], "copy", 0.88))
        rows.append(
            against(f"clip and step, {what}", "torch, fused", ms["fp32_clip"], ms["torch_fp32_clip"], "ms", 1.15)
        )
        keep(args, "gpu_optimizer", numbers, rows, limits=limits)
    times = measured(dropouts(total // 10, args.device), args)
    numbers["dropout"], ms = rounded(times), times["ms"]
    rows.append(against("dropout of bf16 activations", "torch", ms["here"], ms["torch"], "ms"))
    times = measured(of_rows(total // 32_000_000, args.device), args)
    numbers["of rows"], ms = rounded(times), times["ms"]
    of_torch = ("layer norm", "RMS norm", "gradient of a bias", "rotary positions", "cross-entropy")
    for name in (*of_torch, "GELU and the gradient of its bias", "SwiGLU"):
        rows.append(against(f"{name}, bf16", "torch", ms[name], ms[f"torch, {name}"], "ms"))
    name = "sum and layer norm"
    rows.append(against(f"{name}, bf16", "one after the other", ms[name], ms[f"apart, {name}"], "ms"))
    finish(args, "gpu_optimizer", numbers, rows, limits=limits)


def measured(calls: dict[str, Callable[[], Any]], args: Any) -> dict[str, dict[str, float]]:
    """{"ms": the device's median milliseconds per call, "host_ms": the host's}. The first two turns warm up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(args.rounds + 2):
        for name, call in calls.items():
            times[name].append(gpu.on_device(call, args.device, CALLS))
    return {
        kind: {name: statistics.median(pair[i] for pair in pairs[2:]) for name, pairs in times.items()}
        for i, kind in enumerate(("ms", "host_ms"))
    }


def rounded(times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {kind: {name: round(ms, 3) for name, ms in of.items()} for kind, of in times.items()}


def odd_sizes(total: int, count: int = 2000) -> list[int]:
    """`count` odd sizes that sum to about `total`; some are a hundred times as large as others."""
    weights = [1 + 99 * (i % 7 == 0) for i in range(count)]
    return [max(1, total * w // sum(weights)) | 1 for w in weights]


def contenders(sizes: list[int], device: str) -> dict[str, Callable[[], Any]]:
    import torch

    from engine.ops import fused

    def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.rand(n, dtype=dtype, device=device).mul_(1e-3) for n in sizes]  # constants could be faster

    p, g, m, v = (tensors() for _ in range(4))
    half, half_g = tensors(torch.bfloat16), tensors(torch.bfloat16)
    counts = [torch.zeros((), device=device) for _ in sizes]
    norm_sq = torch.zeros((), dtype=torch.float64, device=device)
    norm, gscale, found, one = (torch.ones((), device=device) for _ in range(4))
    parameters = [torch.nn.Parameter(x) for x in p]
    for parameter, gradient in zip(parameters, g, strict=True):
        parameter.grad = gradient

    def fp32_clip() -> None:
        fused.grad_norm_sq(g, norm_sq)
        fused.clip_coef_(norm_sq, 1.0, norm, gscale, found, loss_scale=one)
        fused.adamw_(p, g, m, v, counts, gscale=gscale, found_inf=found, **SETTINGS)

    def torch_fp32_clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        torch._fused_adamw_(
            p, g, m, v, [], counts, amsgrad=False, lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
            maximize=False,
        )  # fmt: skip

    return {
        "fp32": lambda: fused.adamw_(p, g, m, v, counts, **SETTINGS),
        "bf16_master": lambda: fused.adamw_(half, half_g, m, v, counts, p, mode="master", **SETTINGS),
        "fp32_clip": fp32_clip,
        "torch_fp32_clip": torch_fp32_clip,
    }


def dropouts(elements: int, device: str) -> dict[str, Callable[[], Any]]:
    import torch
    import torch.nn.functional as F

    from engine.ops import dropout

    x = torch.rand(elements // 1024, 1024, dtype=torch.bfloat16, device=device)
    tokens = torch.arange(x.shape[0], device=device)
    return {
        "here": lambda: dropout(x, 0.1, key=1, site=2, tokens=tokens),
        "torch": lambda: F.dropout(x, 0.1),
    }


def of_rows(thousands: int, device: str) -> dict[str, Callable[[], Any]]:
    """The operators on this many thousand tokens, 1,024 wide (activations 4,096 wide), or on a quarter as many with
    logits of 50,304 classes; all are narrower on a CPU. The layer before GELU has 64 inputs, so its products take
    little time."""
    import torch
    import torch.nn.functional as F

    from engine.ops import (
        Added,
        cross_entropy_,
        dropout_add,
        gated,
        gelu,
        layer_norm,
        linear,
        linear_activated,
        norm_before,
        rms_norm,
        rotate,
        silu,
    )
    from engine.ops.rotary import composed

    tokens = max(1, thousands) * 1024
    width, classes = (1024, 50_304) if device == "cuda" else (128, 320)  # a CPU may multiply bf16 one number at a time

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    x, grad = drawn(tokens, width).requires_grad_(), drawn(tokens, width)
    weight, bias = (drawn(width).requires_grad_() for _ in range(2))
    matrix = drawn(width, width)
    logits, targets = drawn(tokens // 4, classes), torch.randint(classes, (tokens // 4,), device=device)
    shape = (width,)

    def trained(out: torch.Tensor) -> None:
        torch.autograd.grad(out, [t for t in (x, weight, bias) if t.requires_grad], grad, allow_unused=True)

    branch, tokens_of = drawn(tokens, width).requires_grad_(), torch.arange(tokens, device=device)
    keyed: dict[str, Any] = {"key": 1, "site": 2, "tokens": tokens_of}

    def both(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.autograd.grad(pair, [x, branch, weight, bias], [grad, grad])

    def apart() -> None:
        total = dropout_add(branch, x, 0.1, **keyed)
        both((total, layer_norm(total, shape, weight, bias, 1e-5)))

    angles = torch.rand(tokens, 1, 64, device=device)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def turned(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.autograd.grad(pair, [x, branch], [grad, grad])

    narrow, flat = drawn(tokens, 64).requires_grad_(), drawn(4 * width, 64)
    wide_bias, wide_grad = drawn(4 * width).requires_grad_(), drawn(tokens, 4 * width)
    gate, up = (drawn(tokens, 4 * width).requires_grad_() for _ in range(2))

    def derived(out: torch.Tensor, *inputs: torch.Tensor) -> None:
        torch.autograd.grad(out, inputs, wide_grad)

    def their_loss() -> None:
        asked = logits.detach().requires_grad_()
        F.cross_entropy(asked, targets, reduction="sum").backward()

    return {
        "layer norm": lambda: trained(layer_norm(x, shape, weight, bias, 1e-5)),
        "torch, layer norm": lambda: trained(F.layer_norm(x, shape, weight, bias, 1e-5)),
        "RMS norm": lambda: trained(rms_norm(x, weight, 1e-5)),
        "torch, RMS norm": lambda: trained(F.rms_norm(x, shape, eps=1e-5) * weight),
        "gradient of a bias": lambda: trained(linear(x, matrix, bias)),
        "torch, gradient of a bias": lambda: trained(F.linear(x, matrix, bias)),
        "sum and layer norm": lambda: both(norm_before(x, weight, bias, 1e-5, Added(branch, 0.1, **keyed))),
        "apart, sum and layer norm": apart,
        "rotary positions": lambda: turned(rotate(x, branch, cos, sin, 128)),
        "torch, rotary positions": lambda: turned(
            (composed(x, cos, sin, 128, False), composed(branch, cos, sin, 128, False))
        ),
        "GELU and the gradient of its bias": lambda: derived(
            linear_activated(narrow, flat, wide_bias, gelu), narrow, wide_bias
        ),
        "torch, GELU and the gradient of its bias": lambda: derived(
            F.gelu(F.linear(narrow, flat, wide_bias)), narrow, wide_bias
        ),
        "SwiGLU": lambda: derived(gated(silu, gate, up), gate, up),
        "torch, SwiGLU": lambda: derived(F.silu(gate) * up, gate, up),
        # The gradient replaces the logits: other numbers, but at the same cost.
        "cross-entropy": lambda: cross_entropy_(logits, targets, 1.0),
        "torch, cross-entropy": their_loss,
    }


if __name__ == "__main__":
    main()
