"""A whole training step at two widths, and how much of the machine's rate of products it reaches.

BERT (masked LM, one label in seven tokens), GPT-2 and T5 of 4 layers (T5: of each half), ragged rows, fp32: forward,
backward, clipping and fused AdamW, here with packed rows and in transformers with padded ones and with SDPA, from the
same weights. Reached is the model's arithmetic (attention counted, padding and what is computed again not, the
vocabulary at labels only) over the time of a step and the rate of fp32 products measured in the same run. Without
dropout, and with the 0.1 that these models are trained with. Contenders live in one process and take turns.

    python scripts/bench/training_step.py --output result.json
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.families import label, ragged
from scripts.bench.lib import against, child, finish, fraction, machine, parse, parser, steps

TASKS = {"bert": "masked-lm", "gpt2": "causal-lm", "t5": "seq2seq-lm"}
WIDTHS = {768: 0.65, 256: 0.5}  # and the fraction to reach
ROWS = 32


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), help="(default: 768 and 256)")
    p.add_argument("--dropouts", type=float, nargs="+", default=[0.0, 0.1], help="(default: 0 and 0.1)")
    p.add_argument("--child", help="internal: measure a family in this process")
    args = parse(p, widths=[64], dropouts=[0.1])
    if args.child:
        print(json.dumps(measure(args.child, args.widths[0], args.dropouts[0], args.rounds)))
        return
    numbers: dict[str, Any] = {}
    reached = []
    rows = []
    for family in TASKS:
        for width in args.widths:
            machine.measure(child, args.threads)
            for dropout in args.dropouts:
                words = [__file__, "--child", family, "--rounds", str(args.rounds)]
                words += ["--widths", str(width), "--dropouts", str(dropout)]
                found = child(words, args.threads)
                what = f"{family}, {width} wide, dropout {dropout:g}"
                numbers[what] = found
                ours, theirs = found["modelcenter_ms"], found["transformers_ms"]
                rows.append(against(f"step, {what}", "transformers, padded", ours, theirs, "ms"))
                reached.append((what, found, WIDTHS.get(width)))
    rate = machine.limits()["gemm_gflops"]
    for what, found, target in reached:
        for name, wanted in (("modelcenter", target), ("transformers", None)):
            value = found["gflop"] / (found[f"{name}_ms"] / 1000) / rate
            rows.append(fraction(f"{what}: {name}", value, "fp32 products", wanted))
    finish(args, "training_step", numbers, rows, rows_of_a_step=ROWS)


def shape(family: str, width: int, dropout: float) -> dict[str, Any]:
    heads = max(1, width // 64)
    if family == "bert":
        return {
            "vocab_size": 30522, "hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": heads,
            "intermediate_size": 4 * width, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        }  # fmt: skip
    if family == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        return {"vocab_size": 30000, "n_embd": width, "n_layer": 4, "n_head": heads, **drops}
    return {
        "vocab_size": 32128, "d_model": width, "d_kv": 64, "d_ff": 4 * width, "num_layers": 4, "num_heads": heads,
        "dropout_rate": dropout, "decoder_start_token_id": 0,
    }  # fmt: skip


def measure(family: str, width: int, dropout: float, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step of each, and the GFLOP that it needs."""
    import engine

    engine.memory.prepare_torch()
    import torch
    import transformers

    import modelcenter as mc
    from modelcenter.compare import make_rows, pack_rows, pad_rows
    from scripts.bench.lib import flops

    transformers.utils.logging.set_verbosity_error()
    engine.memory.keep_freed_memory()
    torch.manual_seed(0)
    task = TASKS[family]
    config = transformers.AutoConfig.for_model(family, **shape(family, width, dropout))
    auto = {
        "bert": transformers.AutoModelForMaskedLM,
        "gpt2": transformers.AutoModelForCausalLM,
        "t5": transformers.AutoModelForSeq2SeqLM,
    }[family]
    theirs = auto.from_config(config).train()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = mc.from_pretrained(folder).train()
    rows = make_rows(task, vocab_size=30000, num_labels=2, lengths=ragged(ROWS))
    for number, row in enumerate(rows):
        label(row, number, every=7 if family == "bert" else 1)
    target = [len(row.labels) if config.is_encoder_decoder else 0 for row in rows]
    lengths = [
        flops.Row(len(row.input_ids), n, sum(x >= 0 for x in row.labels)) for row, n in zip(rows, target, strict=True)
    ]
    packed, padded = pack_rows(task, rows), pad_rows(task, rows)
    contenders = {"modelcenter": steps.here(ours, packed)}
    contenders["transformers"] = steps.by_torch(theirs, lambda: theirs(**padded).loss)
    times = steps.in_turns(contenders, rounds)
    return {
        **{f"{name}_ms": round(ms, 1) for name, ms in times.items()},
        "gflop": flops.training(config, lengths, "masked" if family == "bert" else "vocabulary") / 1e9,
        "tokens": sum(row.tokens + row.target for row in lengths),
        "parameters": ours.num_parameters(),
    }


if __name__ == "__main__":
    main()
