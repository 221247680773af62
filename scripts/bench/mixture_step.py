"""Decoders with mixtures of experts: a training step, its share of the machine's matrix-product rate, and generation.

A Mixtral with few large experts, of which each token passes through two of eight, and a Qwen3-MoE and an OLMoE with
many small ones, eight of 64, with 4 layers 512 wide, ragged rows and fp32. A step is forward, backward, clipping and
fused AdamW, with packed rows here, and with padded rows in transformers, from the same weights, with each of its
implementations of experts that runs on the machine ("eager" is a loop over experts, "grouped_mm" the default). One more
case has rows of equal length, without padding. 16 prompts of 32 tokens are continued greedily by 32 tokens. Contenders
take turns in one process and the times are medians; their losses and texts agree. The share is the model's arithmetic
(a token's own experts only), divided by the time of a step and the rate of fp32 products, both the best of the same
turns.

    python scripts/bench/mixture_step.py --output result.json
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, flops, fraction, machine, parse, parser, steps, workloads

ROWS = 32
PROMPTS = 16
PRODUCTS = 0.2  # seconds of products in each turn
WARMUP = 1  # rounds
IMPLEMENTATIONS = ("eager", "grouped_mm")  # transformers' batched_mm copies the matrices of each token's experts
CASES = {
    "Mixtral, 2 of 8 experts": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, False),
    "Qwen3-MoE, 8 of 64 experts": ("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 8}, False),
    "OLMoE, 8 of 64 experts": ("olmoe", {"num_experts": 64, "num_experts_per_tok": 8}, False),
    "OLMoE, 8 of 64 experts, equal rows": ("olmoe", {"num_experts": 64, "num_experts_per_tok": 8}, True),
}


def main() -> None:
    p = parser(__doc__, rounds=3)
    p.add_argument("--width", type=int, default=512, help="(default: 512)")
    p.add_argument("--layers", type=int, default=4, help="(default: 4)")
    p.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="(default: all)")
    p.add_argument("--child", help=argparse.SUPPRESS)  # the case to measure in this process
    args = parse(p, width=64, layers=1)
    if args.child:
        print(json.dumps(measure(args.child, args.width, args.layers, args.rounds)))
        return
    numbers: dict[str, Any] = {}
    rows, shares = [], []
    for case in args.cases:
        machine.measure(child, args)
        words = [__file__, "--child", case, "--rounds", str(args.rounds)]
        result = child([*words, "--width", str(args.width), "--layers", str(args.layers)], args.threads)
        numbers[case] = result
        for name in IMPLEMENTATIONS:
            peer = f"transformers, {name}"
            for what in ("step", "generation"):
                ours, theirs = (result[f"{who}_{what}_ms"] for who in ("modelcenter", name))
                rows.append(against(f"{what}, {case}", peer, ours, theirs, "ms"))
        for name in ("modelcenter", *IMPLEMENTATIONS):
            value = result["gflop"] / (result[f"{name}_step_best_ms"] / 1000) / result["gemm_gflops"]
            shares.append(fraction(f"{case}: {name}", value, "fp32 products"))
    finish(args, "mixture_step", numbers, rows + shares, rows_of_a_step=ROWS)


def config_fields(case: str, width: int, layers: int) -> dict[str, Any]:
    """The fields of transformers' config. A token's experts together have four times the model's width."""
    kind, experts, _ = CASES[case]
    heads, inner = max(1, width // 64), 4 * width // experts["num_experts_per_tok"]
    size = {"moe_intermediate_size": inner, "head_dim": 64} if kind == "qwen3_moe" else {"intermediate_size": inner}
    return {
        "model_type": kind, "vocab_size": 30000, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2), **size, **experts,
    }  # fmt: skip


def measure(case: str, width: int, layers: int, rounds: int) -> dict[str, float]:
    """The median and lowest milliseconds of a step of each model, its GFLOP, and the best rate of products in the same
    turns."""
    workloads.prepare_process()
    import torch
    import transformers

    import modelcenter as mc
    from modelcenter.compare import pack_rows, pad_rows
    from scripts.bench.lib import rates

    fields = config_fields(case, width, layers)
    config = transformers.AutoConfig.for_model(**fields)
    lengths = [64] * ROWS if CASES[case][2] else workloads.ragged_lengths(ROWS)
    rows = workloads.labelled_rows("causal-lm", lengths)
    packed, padded = pack_rows("causal-lm", rows), pad_rows("causal-lm", rows)
    packed["row_ids"] = torch.arange(len(rows))
    with torch.no_grad():
        products = rates.fastest_products()[1].for_seconds(PRODUCTS)
    ids = torch.randint(1, config.vocab_size, (PROMPTS, 32))
    training: dict[str, Any] = {"products": torch.no_grad()(products.call)}
    writing: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        ours = mc.from_pretrained(folder).train()
        training["modelcenter"] = steps.engine_step(ours, packed)
        written = mc.from_pretrained(folder)
        writing["modelcenter"] = functools.partial(written.generate, ids, eos_token_id=[], max_new_tokens=32)
        for name in IMPLEMENTATIONS:
            load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, folder)
            model, peer = load(experts_implementation=name).train(), load(experts_implementation=name)
            training[name] = steps.torch_step(model, functools.partial(loss_of, model, padded))
            peer.generation_config.eos_token_id = None
            writing[name] = functools.partial(
                peer.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32
            )
    losses = {name: float(call()) for name, call in training.items() if name != "products"}
    if max(losses.values()) - min(losses.values()) > 1e-3:
        raise SystemExit(f"the contenders do not train the same model: their first losses are {losses}")
    texts = {name: call() for name, call in writing.items()}
    same = {name: (text == texts["modelcenter"]).float().mean().item() for name, text in texts.items()}
    found: dict[str, float] = {}
    for what, contenders in (("step", training), ("generation", writing)):
        for name, ms in steps.in_turns(contenders, rounds + WARMUP).items():
            found[f"{name}_{what}_ms"] = round(statistics.median(ms[WARMUP:]), 1)
            found[f"{name}_{what}_best_ms"] = round(min(ms[WARMUP:]), 1)
    return {
        **found,
        **{f"{name}_first_loss": round(loss, 5) for name, loss in losses.items()},
        **{f"{name}_same_tokens": round(share, 4) for name, share in same.items()},
        "gemm_gflops": round(products.gflop / (found["products_step_best_ms"] / 1000), 1),
        "gflop": flops.training(config, workloads.row_sizes(rows, False), "causal-lm") / 1e9,
        "tokens": sum(lengths),
        "parameters": ours.num_parameters(),
    }


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    return model(**batch).loss


if __name__ == "__main__":
    main()
