"""The cost of dropout on the CPU: the operator that draws its mask from a counter, compared with torch's; and dropout,
residual and norm as one operator, compared with the fastest separate operators.

    python scripts/bench/dropout.py [--tokens 8192] [--channels 768] [--rounds 3] [--output result.json]

In each round one process times all contenders in turn and keeps the best of several runs of each. The results are the
medians over the rounds, in nanoseconds per element. `copy` is x * 1.5, which reads and writes the same bytes; a norm is
measured forward and backward.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, fraction, machine, median, parse, parser, steps, take_turns

# This project's operators, and the torch operators that they are compared with.
PEERS = {
    "dropout": "torch",
    "dropout_add": "torch_add",
    "dropout_bf16": "torch_bf16",
    "dropout_add_backward": "torch_backward",
}
# The operator for a sum and its norm, and the separate operators.
APART = {"sum_and_layer_norm": "layer_norm_apart", "sum_and_rms_norm": "rms_norm_apart"}
NAMES = ("copy", *PEERS.values(), "dropout_add_bf16", *PEERS, *APART, *APART.values())


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--tokens", type=int, default=8192, help="(default: 8192)")
    p.add_argument("--channels", type=int, default=768, help="(default: 768)")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parse(p, tokens=256)
    if args.child:
        print(json.dumps({**measure(args.tokens, args.channels), "library": machine.operator_library()}))
        return
    command = [__file__, "--child", "--tokens", str(args.tokens), "--channels", str(args.channels)]
    results = take_turns({"all": lambda _: child(command, args.threads)}, args)["all"]
    ns = {name: median(results, name) for name in NAMES}
    ratios = {
        "dropout_speed_over_torch": ns["torch"] / ns["dropout"],
        "dropout_add_speed_over_torch": ns["torch_add"] / ns["dropout_add"],
        "bf16_speed_over_torch": ns["torch_bf16"] / ns["dropout_bf16"],
    }
    numbers = {
        "ns_per_element": {name: round(value, 3) for name, value in ns.items()},
        "ratios": {name: round(value, 2) for name, value in ratios.items()},
        "library": results[0]["library"],
    }
    rows = [
        against(ours.replace("_", " "), "torch", ns[ours], ns[theirs], "ns/element") for ours, theirs in PEERS.items()
    ]
    rows += [
        against(ours.replace("_", " "), "one after the other", ns[ours], ns[theirs], "ns/element")
        for ours, theirs in APART.items()
    ]
    rows.append(fraction("dropout", ns["copy"] / ns["dropout"], "reading and writing as much"))
    finish(args, "dropout", numbers, rows)


def measure(tokens: int, channels: int) -> dict[str, float]:
    """The lowest nanoseconds per element of each contender."""
    best = steps.best_ms(contenders(tokens, channels), 9)
    return {name: 1e6 * ms / (tokens * channels) for name, ms in best.items()}


def contenders(tokens: int, channels: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    from engine.ops import Added, dropout, dropout_add, norm_before, rms_norm

    torch.manual_seed(0)
    x, residual = torch.randn(tokens, channels), torch.randn(tokens, channels)
    half, half_residual = x.bfloat16(), residual.bfloat16()
    keyed: dict[str, Any] = {"key": 1, "site": 2, "tokens": torch.arange(tokens)}
    leaf, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
    ours, theirs = dropout_add(leaf, other, 0.1, **keyed), other + F.dropout(leaf, 0.1)

    def backward(out: torch.Tensor) -> None:
        torch.autograd.grad(out, (leaf, other), x, retain_graph=True)

    weight, bias = (torch.randn(channels).requires_grad_() for _ in range(2))

    def trained(pair: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None) -> None:
        leaves = [t for t in (leaf, other, weight, bias) if t is not None]
        torch.autograd.grad(pair, leaves, [x, residual])

    def together(bias: torch.Tensor | None) -> None:
        trained(norm_before(other, weight, bias, 1e-5, Added(leaf, 0.1, **keyed)), bias)

    def apart(bias: torch.Tensor | None) -> None:
        total = dropout_add(leaf, other, 0.1, **keyed)
        normed = rms_norm(total, weight, 1e-5) if bias is None else F.layer_norm(total, (channels,), weight, bias)
        trained((total, normed), bias)

    return {
        "copy": lambda: x * 1.5,
        "torch": lambda: F.dropout(x, 0.1),
        "torch_add": lambda: residual + F.dropout(x, 0.1),
        "torch_bf16": lambda: F.dropout(half, 0.1),
        "dropout": lambda: dropout(x, 0.1, **keyed),
        "dropout_add": lambda: dropout_add(x, residual, 0.1, **keyed),
        "dropout_bf16": lambda: dropout(half, 0.1, **keyed),
        "dropout_add_bf16": lambda: dropout_add(half, half_residual, 0.1, **keyed),
        "torch_backward": lambda: backward(theirs),
        "dropout_add_backward": lambda: backward(ours),
        "sum_and_layer_norm": lambda: together(bias),
        "layer_norm_apart": lambda: apart(bias),
        "sum_and_rms_norm": lambda: together(None),
        "rms_norm_apart": lambda: apart(None),
    }


if __name__ == "__main__":
    main()
