"""Tokens per second of generation against transformers' `generate`: greedy at batch 1 and 16, beam search.

The same weights, prompts and number of new tokens (no end token), fp32. Contenders live in one process and take turns;
the numbers are medians of the turns (in records made before 23 November 2026 each one's best).

    python scripts/bench/generation.py --output result.json
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, parse, parser

CASES = {"greedy, batch 1": (1, 1, 128), "greedy, batch 16": (16, 1, 128), "4 beams, batch 4": (4, 4, 64)}
FAMILIES = {
    "gpt2": {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 512, "vocab_size": 50257},
    "t5": {
        "d_model": 384,
        "d_kv": 64,
        "d_ff": 1024,
        "num_layers": 6,
        "num_decoder_layers": 6,
        "num_heads": 6,
        "vocab_size": 32128,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
    },
}


def main() -> None:
    p = parser(__doc__, rounds=3)
    p.add_argument("--family", help=f"one of {', '.join(FAMILIES)} (default: all)")
    p.add_argument("--case", help="internal: measure in this process")
    args = parse(p)
    if args.case:
        import json

        print(json.dumps(measure(args.family, args.case, args.rounds, args.quick)))
        return
    numbers: dict[str, Any] = {}
    rows = []
    for family in [args.family] if args.family else FAMILIES:
        for case in CASES:
            words = [
                __file__,
                "--family",
                family,
                "--case",
                case,
                "--rounds",
                str(args.rounds),
                *["--quick"][: args.quick],
            ]
            found = child(words, args.threads)
            numbers[f"{family}, {case}"] = found
            speeds = [found[f"{name}_tokens_per_second"] for name in ("modelcenter", "transformers")]
            rows.append(against(f"{family}, {case}", "transformers", *speeds, "tokens/s"))
    finish(args, "generation", numbers, rows, prompt=32)


def measure(family: str, case: str, rounds: int, quick: bool) -> dict[str, float]:
    """New tokens per second of each, in the median of the rounds."""
    import torch
    import transformers

    import modelcenter as mc

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    rows, beams, new = CASES[case]
    new = 8 if quick else new
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    theirs = auto.from_config(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = mc.from_pretrained(folder)
    theirs.generation_config.eos_token_id = None
    ids = torch.randint(1, 30000, (rows, 32))
    more = {"max_new_tokens": new, "num_beams": beams, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    calls = {
        "modelcenter": lambda: ours.generate(ids, **more, eos_token_id=[], pad_token_id=0),
        "transformers": lambda: theirs.generate(ids, **more, pad_token_id=0),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    tokens = {}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            tokens[name] = call()
            if turn:
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(found) for name, found in times.items()}
    speeds = {f"{name}_tokens_per_second": round(rows * new / seconds, 1) for name, seconds in medians.items()}
    same = (tokens["modelcenter"] == tokens["transformers"]).float().mean().item()
    ratio = medians["transformers"] / medians["modelcenter"]
    return {**speeds, "ratio": round(ratio, 3), "same_tokens": round(same, 4)}


if __name__ == "__main__":
    main()
