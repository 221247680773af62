"""Attention of one layer on the CPU, forward and backward, and rotary positions: our operators compared with torch's.

    python scripts/bench/attention.py [--rows 16] [--length 512] [--rounds 3] [--output result.json]

Rows are ragged. Here they are packed; torch's scaled_dot_product_attention gets them padded, with the mask that
transformers would make: it hides padding, later tokens, or tokens far away on both sides (ModernBERT), adds a bias for
each distance (T5), or depends on segments (CPM). The masks are made beforehand, because layers share them, and
gradients stop at them. torch has no operator for scores with products for each distance (DeBERTa): the products with
the vectors of all distances are computed, and those of each pair gathered. Nor has it one for a soft cap of the scores
(Gemma 2), which is composed as in transformers. In each round one process times all contenders in turn and keeps the
best of several runs of each; the results are the medians.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, machine, median, parse, parser, steps, take_turns, workloads

HEADS, CHANNELS, CAP = 8, 64, 50.0
KINDS = ("of an encoder", "of a decoder", "in a window", "with a bias", "by segments", "with distances", "with a cap")
ROTARY = ("rotary positions", "rotary positions of one token")


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--rows", type=int, default=16, help="(default: 16)")
    p.add_argument("--length", type=int, default=512, help="maximum tokens of a row (default: 512)")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parse(p, rows=3, length=64)
    if args.child:
        measured = steps.best_ms(contenders(args.rows, args.length), 7)
        print(json.dumps({**measured, "library": machine.operator_library()}))
        return
    command = [__file__, "--child", "--rows", str(args.rows), "--length", str(args.length)]
    results = take_turns({"all": lambda _: child(command, args.threads)}, args)["all"]
    ms = {name: median(results, name) for kind in (*KINDS, *ROTARY) for name in (kind, f"torch, {kind}")}
    numbers = {"ms": {name: round(value, 3) for name, value in ms.items()}, "library": results[0]["library"]}
    rows = [against(f"attention {kind}", "torch, padded", ms[kind], ms[f"torch, {kind}"], "ms") for kind in KINDS]
    rows += [against(name, "torch", 1000 * ms[name], 1000 * ms[f"torch, {name}"], "us") for name in ROTARY]
    finish(args, "attention", numbers, rows)


def contenders(rows: int, length: int) -> dict[str, Callable[[], Any]]:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from engine.ops import rotate
    from engine.ops.rotary import composed
    from modelcenter.layers.distances import Distances
    from modelcenter.layers.mask import Mask
    from modelcenter.layers.packed_attention import packed_attention
    from modelcenter.layers.packing import Packed
    from modelcenter.layers.segments import Segments

    torch.manual_seed(0)
    lengths = [n * length // 128 for n in workloads.ragged_lengths(rows)]
    longest, tokens = max(lengths), sum(lengths)
    packed = Packed.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), longest, tokens)
    inside = torch.arange(longest) < torch.tensor(lengths)[:, None]
    bias, between = torch.randn(HEADS, 2 * longest - 1), torch.randn(HEADS, 4, 4)
    # A row is a prompt, whose tokens all see each other, and an answer; each consists of two segments.
    place = torch.arange(longest)
    context, segment = (place < longest // 2).expand(rows, -1), (4 * place // longest).expand(rows, -1)
    segments = Segments.of(context, torch.zeros_like(segment), segment)
    masks = {
        "of an encoder": Mask(),
        "of a decoder": Mask(True),
        "in a window": Mask(window=length // 8),
        "with a bias": Mask(bias=bias.requires_grad_()),
        "by segments": Mask(bias=bias, segments=segments[inside], segment_bias=between.requires_grad_()),
    }
    whole = {
        kind: mask.rectangle(longest, longest, inside, like=bias, segments=(segments, segments))
        if kind == "by segments"
        else mask.rectangle(longest, longest, inside, like=bias)
        for kind, mask in masks.items()
    }
    q, k, v, slope = torch.randn(4, tokens, HEADS * CHANNELS)
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))

    def padded(x: Tensor) -> Tensor:
        room = torch.zeros(rows, longest, HEADS, CHANNELS)
        room[inside] = x.detach().view(tokens, HEADS, CHANNELS)
        return room.transpose(1, 2)

    padded_leaves, padded_slope = tuple(padded(x).requires_grad_() for x in (q, k, v)), padded(slope)

    def ours(mask: Mask) -> None:
        queries, keys, values = leaves
        out = packed_attention(queries, keys, values, packed, HEADS, mask=mask)
        trained = [x for x in (mask.bias, mask.segment_bias) if x is not None]
        torch.autograd.grad(out, [*leaves, *trained], slope)

    def theirs(mask: Tensor) -> None:
        queries, keys, values = padded_leaves
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        torch.autograd.grad(out, [*padded_leaves, *([mask] if mask.requires_grad else [])], padded_slope)

    calls: dict[str, Callable[[], Any]] = {}
    for kind, mask in masks.items():
        ready = whole[kind]
        assert ready is not None
        ready = ready.detach().requires_grad_(ready.is_floating_point())
        calls[kind] = partial(ours, mask)
        calls[f"torch, {kind}"] = partial(theirs, ready)

    tables = [x.requires_grad_() for x in torch.randn(2, 2 * longest - 1, HEADS * CHANNELS).unbind()]

    def with_distances() -> None:
        distances = Distances(*(x.unflatten(1, (HEADS, -1)).transpose(0, 1) for x in tables))
        queries, keys, values = leaves
        out = packed_attention(queries, keys, values, packed, HEADS, distances=distances)
        torch.autograd.grad(out, [*leaves, *tables], slope)

    # For each query and key, the row of the table.
    row = (place - place[:, None] + longest - 1).expand(rows, HEADS, -1, -1)
    hidden = ~inside[:, None, None, :]

    def with_distances_by_torch() -> None:
        queries, keys, values = padded_leaves
        of_keys, of_queries = (x.unflatten(1, (HEADS, -1)).permute(1, 2, 0) for x in tables)
        scores = queries @ keys.transpose(2, 3) + (queries @ of_keys).gather(3, row)
        scores = scores + (keys @ of_queries).gather(3, row.transpose(2, 3)).transpose(2, 3)
        weights = (scores / CHANNELS**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        torch.autograd.grad(weights @ values, [*padded_leaves, *tables], padded_slope)

    calls["with distances"], calls["torch, with distances"] = with_distances, with_distances_by_torch

    def with_a_cap() -> None:
        queries, keys, values = leaves
        out = packed_attention(queries, keys, values, packed, HEADS, mask=masks["of a decoder"], cap=CAP)
        torch.autograd.grad(out, leaves, slope)

    seen = whole["of a decoder"]
    assert seen is not None
    unseen = ~seen

    def with_a_cap_by_torch() -> None:
        queries, keys, values = padded_leaves
        scores = CAP * torch.tanh(queries @ keys.transpose(2, 3) / CHANNELS**0.5 / CAP)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        torch.autograd.grad(weights @ values, padded_leaves, padded_slope)

    calls["with a cap"], calls["torch, with a cap"] = with_a_cap, with_a_cap_by_torch

    def by_torch(cos: Tensor, sin: Tensor, *both: Tensor) -> tuple[Tensor, ...]:
        return tuple(composed(x, cos, sin, CHANNELS, False) for x in both)

    cos, sin = torch.randn(2, tokens, 1, CHANNELS // 2)
    for name, part in zip(ROTARY, (slice(None), slice(1)), strict=True):
        trained = name == ROTARY[0]  # tokens are generated without gradients
        some = tuple(x[part].detach().requires_grad_(trained) for x in leaves[:2])
        calls[name] = partial(turn, some, partial(rotate, cos=cos[part], sin=sin[part], head_dim=CHANNELS))
        calls[f"torch, {name}"] = partial(turn, some, partial(by_torch, cos[part], sin[part]))
    return calls


def turn(leaves: tuple[Any, ...], function: Callable[..., tuple[Any, ...]]) -> None:
    """Queries and keys rotated by the function and, if they are trained, their gradients."""
    import torch

    out = function(*leaves)
    if leaves[0].requires_grad:
        torch.autograd.grad(out, leaves, leaves)


if __name__ == "__main__":
    main()
