"""A tokenizer, rows and model sizes small enough to train in a test."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

WORDS = {
    "good": ["fine", "lovely", "great", "happy", "bright"],
    "bad": ["awful", "boring", "sad", "dull", "poor"],
    "both": ["the", "film", "a", "plot", "was", "it", "and", "very", "story", "with", "one", "actor"],
}
SIZES = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_size": 32,
    "max_positions": 32,
    "norm_eps": 1e-6,
}
STILL = {"dropout": 0.0, "attention_dropout": 0.0}  # without dropout, runs that are cut differently can be compared


@cache
def make_tokenizer() -> Any:
    """A BERT tokenizer with the words above; others are [UNK]."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS["good"], *WORDS["bad"], *WORDS["both"], ".", ","]
    return BertTokenizer(vocab={word: i for i, word in enumerate(words)}, do_lower_case=True)


def make_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of 3 to 14 words whose label a model can learn: {"text": ..., "label": "good" | "bad"}."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        label = rng.choice(["good", "bad"])
        words = rng.choices(WORDS["both"], k=rng.randint(2, 12)) + rng.choices(WORDS[label], k=1 + rng.randint(0, 1))
        rng.shuffle(words)
        rows.append({"text": " ".join(words), "label": label})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:  # texts may contain other line breaks than the file's
        return [json.loads(line) for line in file]


def write_folder(path: Path, train: int = 24, dev: int = 11) -> Path:
    """Write data/train.jsonl, data/dev.jsonl and tokenizer/."""
    write_jsonl(path / "data" / "train.jsonl", make_rows(train, seed=1))
    write_jsonl(path / "data" / "dev.jsonl", make_rows(dev, seed=2))
    make_tokenizer().save_pretrained(path / "tokenizer")
    return path


def flags(folder: Path, **changes: Any) -> dict[str, Any]:
    """Flags of a run of a few steps from random weights; `changes` replace or add some."""
    base: dict[str, Any] = {
        "model": "tiny/bert",
        "from_scratch": True,
        "model_config": SIZES | STILL,
        "tokenizer": str(folder / "tokenizer"),
        "train_data": str(folder / "data"),
        "output_dir": str(folder / "run"),
        "batch_size": 8,
        "epochs": 1,
        "lr": 1e-2,
        "log_every": 1,
    }
    if "batch_tokens" in changes:
        del base["batch_size"]
    return base | changes


def command(values: dict[str, Any]) -> list[str]:
    """These flags as words of a command line, which does not allow epochs together with max_steps."""
    words = []
    for name, value in values.items():
        if name == "epochs" and "max_steps" in values:
            continue
        words.append(f"--{name}")
        if isinstance(value, dict):
            words += [f"{key}={v}" for key, v in value.items()]
        elif isinstance(value, list):
            words += [str(v) for v in value]
        elif value is not True:
            words.append(str(value))
    return words
