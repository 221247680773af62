"""Forward and backward of each family against transformers' model of the same weights with SDPA, fp32.

Three settings: rows of equal length; ragged rows, which are packed here and padded there; and ragged rows with a
loss over few labelled positions (one in seven). Contenders live in one process and take turns.

    python scripts/bench/families.py --output result.json
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, parse, parser

_DECODER = {"vocab_size": 30000, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_ENCODER = {
    "vocab_size": 30522,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
FAMILIES = {
    "bert": ("masked-lm", _ENCODER),
    "roberta": ("masked-lm", {**_ENCODER, "max_position_embeddings": 514}),
    "gpt2": ("causal-lm", {**_DECODER, "n_embd": 512, "n_layer": 6, "n_head": 8}),
    # CPM-1 is a GPT-2 with 32 heads of 80 channels, of which this is a smaller sister.
    "cpm1": ("causal-lm", {**_DECODER, "n_embd": 480, "n_layer": 8, "n_head": 6}),
    "t5": (
        "seq2seq-lm",
        {
            "vocab_size": 32128,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 1024,
            "num_layers": 4,
            "num_decoder_layers": 4,
            "num_heads": 8,
            "feed_forward_proj": "gated-gelu",
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "llama": (
        "causal-lm",
        {
            "vocab_size": 30000,
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 1408,
            "tie_word_embeddings": True,
        },
    ),
}
SETTINGS = ("equal lengths", "ragged", "few labels")


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--family", help=f"one of {', '.join(FAMILIES)} (default: all)")
    p.add_argument("--setting", help="internal: measure in this process")
    args = parse(p, family="bert")
    if args.setting:
        print(json.dumps(measure(args.family, args.setting, args.rounds, args.quick)))
        return
    numbers: dict[str, Any] = {}
    rows = []
    quick = ["--quick"] if args.quick else []
    for family in [args.family] if args.family else FAMILIES:
        for setting in SETTINGS:
            words = [__file__, "--family", family, "--setting", setting, "--rounds", str(args.rounds), *quick]
            found = child(words, args.threads)
            numbers[f"{family}, {setting}"] = found
            ours, theirs = found["modelcenter_ms"], found["transformers_ms"]
            rows.append(against(f"{family}, {setting}", "transformers", ours, theirs, "ms"))
    finish(args, "families", numbers, rows)


def measure(family: str, setting: str, rounds: int, quick: bool) -> dict[str, float]:
    """Milliseconds of forward and backward of each, median; and how far their losses are apart."""
    import engine

    engine.memory.prepare_torch()
    import statistics

    import torch
    import transformers

    import modelcenter as mc
    from modelcenter import registry
    from modelcenter.compare import make_rows, pack_rows, pad_rows

    transformers.utils.logging.set_verbosity_error()
    engine.memory.keep_freed_memory()
    torch.manual_seed(0)
    task, shape = FAMILIES[family]
    model_type = "gpt2" if family == "cpm1" else family
    config = transformers.AutoConfig.for_model(model_type, **(shallow(shape) if quick else shape))
    cls = getattr(transformers, registry.get(model_type).arch_map().tasks[task].hf_class)
    theirs = cls(config).train()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = mc.from_pretrained(folder).train()
    lengths = [64] * 16 if setting == "equal lengths" else ragged()
    rows = make_rows(task, vocab_size=30000, num_labels=2, lengths=lengths)
    for number, row in enumerate(rows):
        label(row, number, every=7 if setting == "few labels" else 1)
    packed, padded = pack_rows(task, rows), pad_rows(task, rows)
    times: dict[str, list[float]] = {"modelcenter": [], "transformers": []}
    losses = {}
    for turn in range(rounds + 2):
        for name, model, batch in (("modelcenter", ours, packed), ("transformers", theirs, padded)):
            model.zero_grad()
            began = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            if turn >= 2:
                times[name].append(1000 * (time.perf_counter() - began))
            losses[name] = loss.item()
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        **{f"{name}_ms": round(value, 1) for name, value in medians.items()},
        "ratio": round(medians["transformers"] / medians["modelcenter"], 3),
        "loss_difference": abs(losses["modelcenter"] - losses["transformers"]),
        "parameters": sum(p.numel() for p in ours.parameters()),
    }


def shallow(shape: dict[str, Any]) -> dict[str, Any]:
    """The same with one layer, to see that a benchmark runs."""
    return {k: 1 if k in ("num_hidden_layers", "n_layer", "num_layers") else v for k, v in shape.items()}


def ragged(count: int = 16) -> list[int]:
    """Lengths spread like those of real sentences: log-normal, at most 128."""
    import torch

    draws = torch.randn(count, generator=torch.Generator().manual_seed(1)).mul(0.6).exp().mul(40)
    return [min(128, max(4, int(n))) for n in draws]


def label(row: Any, number: int, every: int) -> None:
    """Give every so many-th token its label, and the others none."""
    row.labels = [t if (i + number) % every == 0 else -100 for i, t in enumerate(row.input_ids)]


if __name__ == "__main__":
    main()
