"""A LoRA step against peft on transformers' model: forward, backward, clipping and AdamW of the updates.

The same GPT-2 and BERT weights, rank and targets (q, k, v; transformers' GPT-2 holds them in one matrix, so its update
has one A for the three), rows of ragged length, dropout 0, fp32. Here rows are packed, there padded. Contenders live in
one process and take turns.

    python scripts/bench/lora.py --output result.json
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.families import FAMILIES, ragged, shallow
from scripts.bench.lib import against, child, finish, parse, parser, steps

RANK = 8
TARGETS = {"gpt2": ["c_attn"], "bert": ["query", "key", "value"]}


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--child", help="internal: measure a family in this process")
    args = parse(p)
    if args.child:
        print(json.dumps(measure(args.child, args.rounds, args.quick)))
        return
    numbers, rows = {}, []
    quick = ["--quick"] if args.quick else []
    for family in TARGETS:
        found = child([__file__, "--child", family, "--rounds", str(args.rounds), *quick], args.threads)
        numbers[family] = found
        rows += [
            against(
                f"LoRA step, {family}, ragged rows", f"peft, {how}", found["modelcenter_ms"], found[f"{key}_ms"], "ms"
            )
            for key, how in (("peft", "peft, padded"), ("peft_grouped", "peft, rows of equal length"))
        ]
    notes = ["Rows of equal length have as many tokens as the ragged ones, and no padding for peft to lose time on."]
    finish(args, "lora", numbers, rows, notes, rank=RANK)


def measure(family: str, rounds: int, quick: bool) -> dict[str, float]:
    """Median milliseconds of a step of each, and the first losses, which must agree."""
    import engine

    engine.memory.prepare_torch()
    import peft
    import torch
    import transformers

    import modelcenter as mc
    from modelcenter.adapters import add_lora
    from modelcenter.compare import make_rows, pack_rows, pad_rows

    transformers.utils.logging.set_verbosity_error()
    engine.memory.keep_freed_memory()
    torch.manual_seed(0)
    task, shape = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **(shallow(shape) if quick else shape))
    auto = transformers.AutoModelForCausalLM if task == "causal-lm" else transformers.AutoModelForMaskedLM
    theirs = auto.from_config(config).train()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = mc.from_pretrained(folder)
    add_lora(ours, rank=RANK, alpha=2 * RANK, targets=["q", "k", "v"])
    ours.train()
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=TARGETS[family], fan_in_fan_out=family == "gpt2"
    )
    theirs = peft.get_peft_model(theirs, settings)
    lengths = ragged()
    even = [round(sum(lengths) / len(lengths))] * len(lengths)
    made = {name: make_rows(task, vocab_size=30000, num_labels=2, lengths=n) for name, n in
            (("ragged", lengths), ("even", even))}  # fmt: skip
    packed, padded = pack_rows(task, made["ragged"]), pad_rows(task, made["ragged"])
    with torch.no_grad():
        difference = abs(ours(**packed).loss.item() - theirs(**padded).loss.item())
    assert difference < 1e-3, f"the contenders' losses are {difference} apart"
    even_rows = pad_rows(task, made["even"])
    contenders = {
        "modelcenter": steps.here(ours, packed),
        "peft": steps.by_torch(theirs, lambda: theirs(**padded).loss),
        "peft_grouped": steps.by_torch(theirs, lambda: theirs(**even_rows).loss),
    }
    times = steps.in_turns(contenders, rounds)
    return {f"{name}_ms": round(ms, 1) for name, ms in times.items()} | {"loss_difference": difference}


if __name__ == "__main__":
    main()
