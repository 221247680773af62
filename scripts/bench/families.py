"""Forward and backward of each model family, compared with transformers' model (SDPA) with the same weights, in fp32.

Each family is measured with rows of equal length, with ragged rows (packed here, padded in transformers), and with
ragged rows in which one token in seven has a label. There are 16 rows of up to 128 tokens, or 4 of up to 1,024 for
Longformer. Contenders take turns in one process.

    python scripts/bench/families.py --output result.json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, parse, parser, steps, workloads

SETTINGS = ("equal lengths", "ragged", "few labels")
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
_GROUPED = {
    "vocab_size": 30000,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("masked-lm", _ENCODER),
    "roberta": ("masked-lm", {**_ENCODER, "max_position_embeddings": 514}),
    "deberta": (
        "masked-lm",
        {
            **_ENCODER,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "deberta-v2": (
        "masked-lm",
        {
            **_ENCODER,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
    ),
    # Its heads have no global tokens here; its texts are long, see LONG.
    "longformer": (
        "masked-lm",
        {**_ENCODER, "max_position_embeddings": 1026, "attention_window": 128, "pad_token_id": 1, "sep_token_id": 2},
    ),
    "modernbert": (
        "masked-lm",
        {
            "vocab_size": 30522,
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "intermediate_size": 1024,
            "local_attention": 32,
            "pad_token_id": 0,
        },
    ),
    "nomic_bert": (
        "masked-lm",
        {
            "vocab_size": 30528,
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "intermediate_size": 1408,
            "type_vocab_size": 2,
        },
    ),
    "esm": (
        "masked-lm",
        {
            **_ENCODER,
            "vocab_size": 33,
            "pad_token_id": 1,
            "mask_token_id": 32,
            "position_embedding_type": "rotary",
            "token_dropout": True,
        },
    ),
    "gpt2": ("causal-lm", {**_DECODER, "n_embd": 512, "n_layer": 6, "n_head": 8}),
    # CPM-1 is a GPT-2 with 32 heads of 80 channels; this is a smaller one.
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
    "llama": ("causal-lm", {**_GROUPED, "tie_word_embeddings": True}),
    "gemma2": ("causal-lm", {**_GROUPED, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 32}),
    "gemma3_text": ("causal-lm", {**_GROUPED, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 32}),
}

# (rows, factor of their lengths) where these are other than elsewhere, (16, 1)
LONG = {"longformer": (4, 8)}


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--family", help=f"one of {', '.join(FAMILIES)} (default: all)")
    p.add_argument("--child", help=argparse.SUPPRESS)  # the setting to measure in this process
    args = parse(p, family="bert")
    if args.child:
        print(json.dumps(measure(args.family, args.child, args.rounds, args.quick)))
        return
    numbers: dict[str, Any] = {}
    rows = []
    quick = ["--quick"] if args.quick else []
    for family in [args.family] if args.family else FAMILIES:
        for setting in SETTINGS:
            words = [__file__, "--family", family, "--child", setting, "--rounds", str(args.rounds), *quick]
            result = child(words, args.threads)
            numbers[f"{family}, {setting}"] = result
            ours, theirs = result["modelcenter_ms"], result["transformers_ms"]
            rows.append(against(f"{family}, {setting}", "transformers", ours, theirs, "ms"))
    finish(args, "families", numbers, rows)


def measure(family: str, setting: str, rounds: int, quick: bool) -> dict[str, float]:
    """The median milliseconds of forward and backward of each model, and the difference of their losses."""
    workloads.prepare_process()
    import transformers

    from modelcenter.compare import pack_rows, pad_rows

    task, fields = FAMILIES[family]
    model_type = "gpt2" if family == "cpm1" else family
    config = transformers.AutoConfig.for_model(model_type, **(workloads.one_layer(fields) if quick else fields))
    ours, theirs = workloads.model_pair(config, task)
    count, factor = LONG.get(family, (16, 1))
    lengths = [64] * count if setting == "equal lengths" else workloads.ragged_lengths(count)
    lengths = [factor * length for length in lengths]
    every = 7 if setting == "few labels" else 1
    rows = workloads.labelled_rows(task, lengths, every, config.vocab_size)
    packed, padded = pack_rows(task, rows), pad_rows(task, rows)
    losses: dict[str, Any] = {}

    def contender(name: str, model: Any, batch: dict[str, Any]) -> Any:
        def step() -> None:
            losses[name] = model(**batch).loss
            losses[name].backward()

        return step

    def clear_gradients() -> None:
        ours.zero_grad()
        theirs.zero_grad()

    contenders = {
        "modelcenter": contender("modelcenter", ours, packed),
        "transformers": contender("transformers", theirs, padded),
    }
    ms = steps.median_ms(contenders, rounds, before=clear_gradients)
    return {
        **{f"{name}_ms": round(value, 1) for name, value in ms.items()},
        "ratio": round(ms["transformers"] / ms["modelcenter"], 3),
        "loss_difference": abs(losses["modelcenter"].item() - losses["transformers"].item()),
        "parameters": ours.num_parameters(),
    }


if __name__ == "__main__":
    main()
