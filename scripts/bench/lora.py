"""A LoRA training step, compared with peft on transformers' model: forward, backward, clipping and AdamW.

The same GPT-2 and BERT weights, rank and targets, ragged rows (packed here, padded in transformers), no dropout, fp32.
The targets are q, k and v; transformers' GPT-2 holds them in one matrix, so its update has one A for all three.
Contenders take turns in one process.

    python scripts/bench/lora.py --output result.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.families import FAMILIES
from scripts.bench.lib import against, child, finish, parse, parser, steps, workloads

RANK = 8
TARGETS = {"gpt2": ["c_attn"], "bert": ["query", "key", "value"]}
PEERS = {"peft": "peft, padded", "peft_grouped": "peft, rows of equal length"}


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--child", help=argparse.SUPPRESS)  # the family to measure in this process
    args = parse(p)
    if args.child:
        print(json.dumps(measure(args.child, args.rounds, args.quick)))
        return
    numbers, rows = {}, []
    quick = ["--quick"] if args.quick else []
    for family in TARGETS:
        result = child([__file__, "--child", family, "--rounds", str(args.rounds), *quick], args.threads)
        numbers[family] = result
        what = f"LoRA step, {family}, ragged rows"
        for key, peer in PEERS.items():
            rows.append(against(what, peer, result["modelcenter_ms"], result[f"{key}_ms"], "ms"))
    notes = ["Rows of equal length have as many tokens as the ragged ones, and no padding for peft to lose time on."]
    finish(args, "lora", numbers, rows, notes, rank=RANK)


def measure(family: str, rounds: int, quick: bool) -> dict[str, float]:
    """The median milliseconds of a step of each contender, and the difference of the first losses, which must agree."""
    workloads.prepare_process()
    import peft
    import torch
    import transformers

    from modelcenter.adapters import add_lora
    from modelcenter.compare import make_rows, pack_rows, pad_rows

    task, fields = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **(workloads.one_layer(fields) if quick else fields))
    ours, theirs = workloads.model_pair(config, task)
    add_lora(ours, rank=RANK, alpha=2 * RANK, targets=["q", "k", "v"])
    ours.train()
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=TARGETS[family], fan_in_fan_out=family == "gpt2"
    )
    theirs = peft.get_peft_model(theirs, settings)
    lengths = workloads.ragged_lengths(2 if quick else 16)
    equal = [round(sum(lengths) / len(lengths))] * len(lengths)
    ragged_rows, equal_rows = (
        make_rows(task, vocab_size=workloads.VOCABULARY, num_labels=2, lengths=n) for n in (lengths, equal)
    )
    packed, padded, grouped = pack_rows(task, ragged_rows), pad_rows(task, ragged_rows), pad_rows(task, equal_rows)
    with torch.no_grad():
        difference = abs(ours(**packed).loss.item() - theirs(**padded).loss.item())
    assert difference < 1e-3, f"the contenders' losses differ by {difference}"
    contenders = {
        "modelcenter": steps.engine_step(ours, packed),
        "peft": steps.torch_step(theirs, lambda: theirs(**padded).loss),
        "peft_grouped": steps.torch_step(theirs, lambda: theirs(**grouped).loss),
    }
    ms = steps.median_ms(contenders, rounds)
    return {f"{name}_ms": round(value, 1) for name, value in ms.items()} | {"loss_difference": difference}


if __name__ == "__main__":
    main()
