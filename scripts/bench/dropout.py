"""What dropout costs on the CPU: the operator that draws its mask from a counter, against torch's.

    python scripts/bench/dropout.py [--tokens 8192] [--channels 768] [--rounds 3] [--output result.json]

In each round a process times all contenders in turn and keeps the best of several runs of each; the medians over
the rounds are reported, in nanoseconds an element. `copy` is x * 1.5, which reads and writes as much.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


NAMES = (
    "copy torch torch_add torch_bf16 dropout dropout_add dropout_bf16 dropout_add_bf16 torch_backward "
    "dropout_add_backward"
).split()


def contenders(tokens: int, channels: int) -> dict:
    import torch
    import torch.nn.functional as F

    from engine.ops import dropout, dropout_add

    torch.manual_seed(0)
    x, residual = torch.randn(tokens, channels), torch.randn(tokens, channels)
    half, half_residual = x.bfloat16(), residual.bfloat16()
    keyed = {"key": 1, "site": 2, "tokens": torch.arange(tokens)}
    leaf, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
    ours, theirs = dropout_add(leaf, other, 0.1, **keyed), other + F.dropout(leaf, 0.1)

    def back(out: torch.Tensor) -> None:
        torch.autograd.grad(out, (leaf, other), x, retain_graph=True)

    return {
        "copy": lambda: x * 1.5,
        "torch": lambda: F.dropout(x, 0.1),
        "torch_add": lambda: residual + F.dropout(x, 0.1),
        "torch_bf16": lambda: F.dropout(half, 0.1),
        "dropout": lambda: dropout(x, 0.1, **keyed),
        "dropout_add": lambda: dropout_add(x, residual, 0.1, **keyed),
        "dropout_bf16": lambda: dropout(half, 0.1, **keyed),
        "dropout_add_bf16": lambda: dropout_add(half, half_residual, 0.1, **keyed),
        "torch_backward": lambda: back(theirs),
        "dropout_add_backward": lambda: back(ours),
    }


def child(tokens: int, channels: int) -> dict[str, float]:
    made = contenders(tokens, channels)
    best = dict.fromkeys(made, float("inf"))
    for _ in range(9):
        for name, call in made.items():
            began = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - began)
    return {name: 1e9 * seconds / (tokens * channels) for name, seconds in best.items()}


def main() -> None:
    import argparse

    from scripts.bench import lib

    p = lib.parser(__doc__)
    p.add_argument("--tokens", type=int, default=8192)
    p.add_argument("--channels", type=int, default=768)
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = lib.parse(p, tokens=256)
    if args.child:
        from engine.ops import library

        print(json.dumps({**child(args.tokens, args.channels), "library": library.cpu().what}))
        return
    command = [__file__, "--child", "--tokens", str(args.tokens), "--channels", str(args.channels)]
    results = lib.take_turns({"all": lambda _: lib.child(command, args.threads)}, args.rounds, args.threads)["all"]
    spent = {name: lib.median(results, name) for name in NAMES}
    ratios = {
        "dropout_speed_over_torch": spent["torch"] / spent["dropout"],
        "dropout_add_speed_over_torch": spent["torch_add"] / spent["dropout_add"],
        "bf16_speed_over_torch": spent["torch_bf16"] / spent["dropout_bf16"],
    }
    numbers = {
        "ns_per_element": {name: round(value, 3) for name, value in spent.items()},
        "ratios": {name: round(value, 2) for name, value in ratios.items()},
        "library": results[0]["library"].rpartition("(")[2].rstrip(")"),
    }
    pairs = (("dropout", "torch"), ("dropout_add", "torch_add"), ("dropout_bf16", "torch_bf16"),
             ("dropout_add_backward", "torch_backward"))  # fmt: skip
    rows = [
        lib.against(ours.replace("_", " "), "torch", spent[ours], spent[theirs], "ns/element") for ours, theirs in pairs
    ]
    rows.append(lib.fraction("dropout", spent["copy"] / spent["dropout"], "reading and writing as much"))
    lib.finish(args, "dropout", numbers, rows)


if __name__ == "__main__":
    main()
