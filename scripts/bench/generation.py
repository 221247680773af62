"""Tokens per second of generation, compared with transformers' `generate`: greedy at batch 1 and 16, and beam search.

The same weights, prompts and number of new tokens (no end token), in fp32. Contenders take turns in one process; the
numbers are medians of the turns (in records made before 23 November 2026, each contender's best turn).

    python scripts/bench/generation.py --output result.json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, parse, parser, steps, workloads

PROMPT = 32  # tokens
CASES = {"greedy, batch 1": (1, 1, 128), "greedy, batch 16": (16, 1, 128), "4 beams, batch 4": (4, 4, 64)}
FAMILIES: dict[str, dict[str, Any]] = {
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
    p.add_argument("--child", help=argparse.SUPPRESS)  # the case to measure in this process
    args = parse(p)
    if args.child:
        print(json.dumps(measure(args.family, args.child, args.rounds, args.quick)))
        return
    numbers: dict[str, Any] = {}
    rows = []
    quick = ["--quick"] if args.quick else []
    for family in [args.family] if args.family else FAMILIES:
        for case in CASES:
            words = [__file__, "--family", family, "--child", case, "--rounds", str(args.rounds), *quick]
            result = child(words, args.threads)
            numbers[f"{family}, {case}"] = result
            ours, theirs = (result[f"{name}_tokens_per_second"] for name in ("modelcenter", "transformers"))
            rows.append(against(f"{family}, {case}", "transformers", ours, theirs, "tokens/s"))
    finish(args, "generation", numbers, rows, prompt=PROMPT)


def measure(family: str, case: str, rounds: int, quick: bool) -> dict[str, float]:
    """The new tokens per second of each contender (median), and the share of equal tokens."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    batch, beams, new = CASES[case]
    new = 8 if quick else new
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    ours, theirs = workloads.model_pair(config, "seq2seq-lm" if config.is_encoder_decoder else "causal-lm")
    ours.eval()
    theirs.eval()
    theirs.generation_config.eos_token_id = None
    ids = torch.randint(1, 30000, (batch, PROMPT))
    settings = {"max_new_tokens": new, "num_beams": beams, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    tokens = {}

    def generate_ours() -> None:
        tokens["modelcenter"] = ours.generate(ids, **settings, eos_token_id=[], pad_token_id=0)

    def generate_theirs() -> None:
        tokens["transformers"] = theirs.generate(ids, **settings, pad_token_id=0)

    ms = steps.median_ms({"modelcenter": generate_ours, "transformers": generate_theirs}, rounds, warmup=1)
    return {
        **{f"{name}_tokens_per_second": round(1000 * batch * new / value, 1) for name, value in ms.items()},
        "ratio": round(ms["transformers"] / ms["modelcenter"], 3),
        "same_tokens": round((tokens["modelcenter"] == tokens["transformers"]).float().mean().item(), 4),
    }


if __name__ == "__main__":
    main()
