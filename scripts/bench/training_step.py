"""A whole training step at two widths, and the share of the machine's matrix-product rate that it reaches.

BERT (masked LM, one label in seven tokens), GPT-2 and T5, with 4 layers (T5: 4 in each half), ragged rows and fp32. A
step is forward, backward, clipping and fused AdamW, with packed rows here, and with padded rows and SDPA in
transformers, from the same weights; without dropout, and with the 0.1 that these models are trained with. The share is
the model's arithmetic (attention included; padding and recomputation excluded; the vocabulary at labels only), divided
by the time of a step and the rate of fp32 products, both the best of the same turns, because a machine's speed changes
within minutes (in records of AMD CPUs, the median step and the median rate of the run). Contenders take turns in one
process; the times of steps are medians. --compiled adds this project's units under torch.compile, and the time until
their first two steps are done.

    python scripts/bench/training_step.py --output result.json
"""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, flops, fraction, machine, parse, parser, steps, workloads

TASKS = {"bert": "masked-lm", "gpt2": "causal-lm", "t5": "seq2seq-lm"}
TARGETS = {768: 0.65, 256: 0.5}  # width: the target share
ROWS = 32
PRODUCTS = 0.2  # seconds of products in each turn
WARMUP = 2  # rounds


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--widths", type=int, nargs="+", default=list(TARGETS), help="(default: 768 and 256)")
    p.add_argument("--dropouts", type=float, nargs="+", default=[0.0, 0.1], help="(default: 0 and 0.1)")
    p.add_argument("--families", nargs="+", choices=list(TASKS), default=list(TASKS), help="(default: all)")
    p.add_argument(
        "--compiled", action="store_true", help="also measure compiled units, whose compilation takes minutes"
    )
    p.add_argument("--child", help=argparse.SUPPRESS)  # the family to measure in this process
    args = parse(p, widths=[64], dropouts=[0.1])
    if args.child:
        print(json.dumps(measure(args.child, args.widths[0], args.dropouts[0], args.rounds, args.compiled)))
        return
    numbers: dict[str, Any] = {}
    rows, shares = [], []
    for family in args.families:
        for width in args.widths:
            machine.measure(child, args)
            for dropout in args.dropouts:
                words = [__file__, "--child", family, "--rounds", str(args.rounds)]
                words += ["--widths", str(width), "--dropouts", str(dropout)] + ["--compiled"] * args.compiled
                result = child(words, args.threads)
                what = f"{family}, {width} wide, dropout {dropout:g}"
                numbers[what] = result
                ours, theirs = result["modelcenter_ms"], result["transformers_ms"]
                rows.append(against(f"step, {what}", "transformers, padded", ours, theirs, "ms"))
                if args.compiled:
                    peer = "modelcenter, compiled units"
                    rows.append(against(f"step, {what}", peer, ours, result["compiled_ms"], "ms"))
                for name, wanted in (("modelcenter", TARGETS.get(width)), ("transformers", None)):
                    value = result["gflop"] / (result[f"{name}_best_ms"] / 1000) / result["gemm_gflops"]
                    shares.append(fraction(f"{what}: {name}", value, "fp32 products", wanted))
    finish(args, "training_step", numbers, rows + shares, rows_of_a_step=ROWS)


def config_fields(family: str, width: int, dropout: float) -> dict[str, Any]:
    heads = max(1, width // 64)
    if family == "bert":
        return {
            "vocab_size": 30522, "hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": heads,
            "intermediate_size": 4 * width, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        }  # fmt: skip
    if family == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        return {"vocab_size": 30000, "n_embd": width, "n_layer": 4, "n_head": heads, **dropouts}
    return {
        "vocab_size": 32128, "d_model": width, "d_kv": 64, "d_ff": 4 * width, "num_layers": 4, "num_heads": heads,
        "dropout_rate": dropout, "decoder_start_token_id": 0,
    }  # fmt: skip


def measure(family: str, width: int, dropout: float, rounds: int, compiled: bool) -> dict[str, float]:
    """The median and lowest milliseconds of a step of each model, its GFLOP, and the best rate of products in the same
    turns."""
    workloads.prepare_process()
    import torch
    import transformers

    import engine
    from modelcenter.compare import pack_rows, pad_rows
    from scripts.bench.lib import rates

    task = TASKS[family]
    config = transformers.AutoConfig.for_model(family, **config_fields(family, width, dropout))
    ours, theirs = workloads.model_pair(config, task)
    rows = workloads.labelled_rows(task, workloads.ragged_lengths(ROWS), every=7 if family == "bert" else 1)
    packed, padded = pack_rows(task, rows), pad_rows(task, rows)
    packed["row_ids"] = torch.arange(len(rows))
    with torch.no_grad():
        products = rates.fastest_products()[1].for_seconds(PRODUCTS)
    contenders = {
        "modelcenter": steps.engine_step(ours, packed),
        "transformers": steps.torch_step(theirs, lambda: theirs(**padded).loss),
        "products": torch.no_grad()(products.call),
    }
    found = {}
    if compiled:
        units = engine.shard(copy.deepcopy(ours), policy=engine.Policy(compile=True))
        contenders["compiled"] = step = steps.engine_step(units, packed)
        began = time.perf_counter()
        for _ in range(2):
            step()
        found["compiled_seconds"] = round(time.perf_counter() - began, 1)
    for name, ms in steps.in_turns(contenders, rounds + WARMUP).items():
        found[f"{name}_ms"] = round(statistics.median(ms[WARMUP:]), 1)
        found[f"{name}_best_ms"] = round(min(ms[WARMUP:]), 1)
    sizes = workloads.row_sizes(rows, config.is_encoder_decoder)
    return {
        **found,
        "gemm_gflops": round(products.gflop / (found["products_best_ms"] / 1000), 1),
        "gflop": flops.training(config, sizes, task) / 1e9,
        "tokens": sum(row.tokens + row.target for row in sizes),
        "parameters": ours.num_parameters(),
    }


if __name__ == "__main__":
    main()
