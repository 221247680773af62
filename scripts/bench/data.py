"""Loading and tokenising short rows, compared with `datasets`; the fill of batches, and the speed of making them.

Loading reads a jsonl file and returns token ids: here with this project's readers and tokeniser, in the peer with
`datasets.load_dataset` and `datasets.map` with the tokenizer in batches. Both start without a cache and have the same
number of threads or processes; a second peer uses the tokenizer's own threads instead of processes. Slot utilisation is
the number of tokens divided by the budget of full global batches (`parts` microbatches each), for the lengths of the
data. Padding is the share that batches of a fixed number of rows would have if padded to their longest row.

    python scripts/bench/data.py --rows 1000000 --data path/to/data --output result.json

The folder of --data holds sst2/train.tsv (label, tab, sentence), whose sentences are repeated until there are enough
rows; without it the sentences of scripts/samples are used.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, fraction, median, parse, parser, take_turns
from scripts.bench.lib.finetuning import tokenizers
from scripts.bench.lib.finetuning.tasks import TASKS

OURS = """
import json, os, sys, time
from pathlib import Path
from transformers import AutoTokenizer
from modelcenter.data.readers import read_file
from modelcenter.data.tokenization.tokenize import tokenize
folder, cache = sys.argv[1], sys.argv[2]
os.environ["MODELCENTER_CACHE"] = cache
tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")
began = time.perf_counter()
table = read_file(Path(folder, "rows.jsonl"))
read = time.perf_counter()
tokens = tokenize(tokenizer, table.columns["text"], max_length=128)
done = time.perf_counter()
again = tokenize(tokenizer, table.columns["text"], max_length=128)
print(json.dumps({"seconds": done - began, "reading": read - began, "tokenising": done - read,
    "cached": time.perf_counter() - done, "tokens": int(tokens.offsets[-1])}))
"""

THEIRS = """
import json, os, sys, time
folder, cache, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.environ["HF_DATASETS_CACHE"] = cache
if workers > 1:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
import datasets
from transformers import AutoTokenizer
datasets.disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")
began = time.perf_counter()
data = datasets.load_dataset("json", data_files=folder + "/rows.jsonl", split="train")
read = time.perf_counter()
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=128), batched=True,
    num_proc=workers if workers > 1 else None, remove_columns=data.column_names)
done = time.perf_counter()
tokens = sum(sum(map(len, batch["input_ids"])) for batch in data.iter(100000))
print(json.dumps({"seconds": done - began, "reading": read - began, "tokenising": done - read, "tokens": tokens}))
"""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--data", help="folder with sst2")
    p.add_argument("--rows", type=int, default=1_000_000, help="rows to read and tokenise (default: 1000000)")
    args = parse(p, rows=2000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = prepare(folder, args)

        def contender(script: str, *more: str) -> Callable[[int], dict]:
            def run(turn: int) -> dict:
                with tempfile.TemporaryDirectory() as cache:  # empty
                    env = {"RAYON_NUM_THREADS": str(args.threads)}
                    return child(["-c", script, str(folder), cache, *more], args.threads, env=env)

            return run

        contenders = {
            "modelcenter": contender(OURS),
            "datasets_processes": contender(THEIRS, str(args.threads)),
            "datasets_threads": contender(THEIRS, "1"),
        }
        results = take_turns(contenders, args)
        lengths = token_lengths(folder, texts)
        lengths = np.resize(lengths, max(len(lengths), 8000))  # repeated if there are few
    counts = {r["tokens"] for found in results.values() for r in found}
    assert len(counts) == 1, f"the contenders made different tokens: {counts}"
    seconds = {name: median(found, "seconds") for name, found in results.items()}
    numbers = {
        "rows": args.rows,
        "tokens": counts.pop(),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "reading": {name: round(median(found, "reading"), 2) for name, found in results.items()},
        "tokenising": {name: round(median(found, "tokenising"), 2) for name, found in results.items()},
        "again_from_the_cache": round(median(results["modelcenter"], "cached"), 2),
        "times_as_fast_as_processes": round(seconds["datasets_processes"] / seconds["modelcenter"], 2),
        "times_as_fast_as_threads": round(seconds["datasets_threads"] / seconds["modelcenter"], 2),
        "batches": batches(lengths),
        "sampler": sampler(args.rows, lengths),
    }
    what, unit = f"{args.rows:,} short rows read and tokenised", "s"
    rows = [
        against(what, f"datasets.map, {args.threads} processes", seconds["modelcenter"], seconds["datasets_processes"],
                unit, 1.0, "both wait for the same Rust tokenizer; reading jsonl is Python here and C++ there"),
        against(what, "datasets.map, the tokenizer's threads", seconds["modelcenter"], seconds["datasets_threads"],
                unit, 1.0),
        fraction("slots filled, batches of 4,096 tokens", numbers["batches"]["tokens_4096x1"]["mean"], "all slots",
                 0.98),
        fraction("slots filled, batches of 32 rows, if they were padded", numbers["batches"]["rows_32"]["if_padded"],
                 "all slots"),
    ]  # fmt: skip
    finish(args, "data", numbers, rows)


def prepare(folder: Path, args: argparse.Namespace) -> list[str]:
    """rows.jsonl and the tokenizer; returns the distinct texts."""
    texts = list(dict.fromkeys(row["text"] for row in TASKS["classification"].read(args.data, "train")))
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for i in range(args.rows):
            file.write(json.dumps({"id": i, "text": texts[i % len(texts)], "label": i % 2}, ensure_ascii=False) + "\n")
    tokenizers.wordpiece(texts).save_pretrained(folder / "tokenizer")
    return texts


def token_lengths(folder: Path, texts: list[str]) -> np.ndarray:
    from transformers import AutoTokenizer

    from modelcenter.data.tokenization.tokenize import tokenize

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return tokenize(tokenizer, texts, max_length=128, cache=False).lengths


def batches(lengths: np.ndarray) -> dict:
    """The fill of batches, for the lengths of the data."""
    from modelcenter.data.sampling import EpochBatches, TokenBatches

    found: dict = {}
    for part in (128, 512, 2048, 4096):
        for parts in (1, 4):
            full = TokenBatches(lengths, part * parts, 0, part).epoch(0)[:-1]
            used = [int(lengths[rows].sum()) / (part * parts) for rows in full]
            found[f"tokens_{part}x{parts}"] = {"mean": round(float(np.mean(used)), 4), "least": round(min(used), 4)}
    plan = EpochBatches(lengths, 32, 0).epoch(0)
    slots = sum(len(rows) * int(lengths[rows].max()) for rows in plan)
    tokens = np.array([lengths[rows].sum() for rows in plan[:-1]])
    found["rows_32"] = {
        "if_padded": round(int(lengths.sum()) / slots, 4),
        "most_over_mean_tokens": round(float(tokens.max() / tokens.mean()), 3),
    }
    return found


def sampler(rows: int, lengths: np.ndarray) -> dict:
    """Seconds to plan, and to make the batches of an epoch."""
    from modelcenter.data.sampling import EpochBatches, TokenBatches

    lengths = np.tile(lengths, -(-rows // len(lengths)))[:rows]
    began = time.perf_counter()
    plan = TokenBatches(lengths, 4 * 4096, 0, 4096)
    planned = time.perf_counter()
    plan.epoch(1)
    done = time.perf_counter()
    EpochBatches(lengths, 128, 0).epoch(1)
    return {
        "rows": rows,
        "plan_tokens": round(planned - began, 3),
        "epoch_tokens": round(done - planned, 3),
        "epoch_rows": round(time.perf_counter() - done, 3),
    }


if __name__ == "__main__":
    main()
