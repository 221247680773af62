"""Tokens per second of generation, compared with transformers' `generate`: greedy at batch 1 and 16, and beam search.

The same weights, prompts and number of new tokens (no end token), in fp32. Contenders take turns in one process; the
numbers are medians of the turns (in records made before 23 November 2026, each contender's best turn).

"Many texts" are 96 texts of unequal lengths, 4 to 128 tokens, for prompts of unequal lengths, as an evaluation or
prediction generates them: 16 rows at a time, sorted by the prompts' lengths. Here (`batch_size=16`) a row whose text
has ended makes room for the next; transformers gets batches of 16, in which a stopping criterion ends each row.

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
MANY = {"many texts, greedy": 1, "many texts, 4 beams": 4}  # beams
ROWS, TEXTS = 16, 96
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
        for case in (*CASES, *MANY):
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
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    ours, theirs = workloads.model_pair(config, "seq2seq-lm" if config.is_encoder_decoder else "causal-lm")
    ours.eval()
    theirs.eval()
    theirs.generation_config.eos_token_id = None
    return (many if case in MANY else equal)(ours, theirs, case, rounds, quick)


def equal(ours: Any, theirs: Any, case: str, rounds: int, quick: bool) -> dict[str, float]:
    """`measure` for texts of equal length."""
    import torch

    batch, beams, new = CASES[case]
    new = 8 if quick else new
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


def many(ours: Any, theirs: Any, case: str, rounds: int, quick: bool) -> dict[str, float]:
    """`measure` for many texts of unequal lengths."""
    import torch
    from transformers import StoppingCriteriaList

    beams, texts = MANY[case], 8 if quick else TEXTS
    lengths = torch.randint(8, 2 * PROMPT, (texts,)).sort(descending=True).values
    limits = torch.randn(texts).mul(0.5).add(3.3).exp().long().clamp(4, 12 if quick else 128).tolist()
    mask = (torch.arange(int(lengths[0])) >= lengths[0] - lengths[:, None]).long()
    ids = torch.randint(1, 30000, mask.shape) * mask
    settings = {"num_beams": beams, "do_sample": False, "pad_token_id": 0}
    written: dict[str, list[list[int]]] = {}

    def new_tokens(tokens: torch.Tensor, limits: list[int]) -> list[list[int]]:
        start = 1 if theirs.config.is_encoder_decoder else ids.shape[1]
        return [row[start : start + limit].tolist() for row, limit in zip(tokens, limits, strict=True)]

    def generate_ours() -> None:
        tokens = ours.generate(ids, mask, limits, batch_size=ROWS, eos_token_id=[], **settings)
        written["modelcenter"] = new_tokens(tokens, limits)

    def generate_theirs() -> None:
        written["transformers"] = []
        for first in range(0, texts, ROWS):
            rows, most = slice(first, first + ROWS), torch.tensor(limits[first : first + ROWS])
            start = 1 if theirs.config.is_encoder_decoder else ids.shape[1]

            def ended(
                tokens: torch.Tensor, scores: Any, start: int = start, most: torch.Tensor = most, **_: Any
            ) -> Any:
                """Whether each row has its number of tokens; beam search asks for several candidates of each."""
                return (tokens.shape[1] - start >= most).repeat_interleave(len(tokens) // len(most))

            criteria: Any = StoppingCriteriaList([ended])
            more = {"attention_mask": mask[rows], "max_new_tokens": int(most.max()), "stopping_criteria": criteria}
            tokens = theirs.generate(ids[rows], **more, **settings)
            written["transformers"] += new_tokens(tokens, most.tolist())

    ms = steps.median_ms({"modelcenter": generate_ours, "transformers": generate_theirs}, rounds, warmup=1)
    pairs = list(zip(*written.values(), strict=True))
    return {
        **{f"{name}_tokens_per_second": round(1000 * sum(limits) / value, 1) for name, value in ms.items()},
        "ratio": round(ms["transformers"] / ms["modelcenter"], 3),
        "same_tokens": round(sum(a == b for a, b in pairs) / texts, 4),
    }


if __name__ == "__main__":
    main()
