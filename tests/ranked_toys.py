"""Rows of texts to rank, small enough to train on in a test."""

import random

from related_toys import make_related
from toydata import WORDS, make_tokenizer, write_jsonl

_ALL = [word for words in WORDS.values() for word in words]
KINDS = ("negatives", "pairs", "lists")


def make_ranked(count: int, seed: int, kind: str, graded: bool = False) -> list[dict]:
    """Rows of a query with a positive and one to three negatives, with a text and a label (rows may share a query), or
    with lists of one to four texts and labels.

    Args:
        graded: labels are 0, 0.5, 1 or 3 instead of 0 or 1.
    """
    if kind == "negatives":
        return [row | {"negatives": row["negatives"] or ["a dull film"]} for row in make_related(count, seed, 3)]
    rng = random.Random(seed)

    def text(low, high):
        return " ".join(rng.choices(_ALL, k=rng.randint(low, high)))

    labels = [0, 0.5, 1, 3] if graded else [0, 1]
    if kind == "lists":
        counts = [rng.randint(1, 4) for _ in range(count - 1)]
        return [
            {"query": text(2, 5), "docs": [text(2, 8) for _ in range(n)], "labels": rng.choices(labels, k=n)}
            for n in [3, *counts]
        ]
    queries = [text(2, 5) for _ in range(2 + count // 3)]
    return [{"query": rng.choice(queries), "text": text(2, 8), "label": rng.choice(labels)} for _ in range(count)]


def write_ranked(folder, train: int = 24, dev: int = 11, **kinds) -> list[dict]:
    """Write data/train.jsonl, data/dev.jsonl and tokenizer/; returns the rows to train on."""
    rows = make_ranked(train, 1, **kinds)
    write_jsonl(folder / "data" / "train.jsonl", rows)
    write_jsonl(folder / "data" / "dev.jsonl", make_ranked(dev, 2, **kinds))
    make_tokenizer().save_pretrained(folder / "tokenizer")
    return rows


def groups_of(rows: list[dict]) -> list[tuple[str, list[str], list[float]]]:
    """(query, its texts, their labels); pairs with the same query are merged."""
    if "label" not in rows[0]:
        return [
            (row["query"], row["docs"], row["labels"])
            if "docs" in row
            else (row["query"], [row["positive"], *row["negatives"]], [1.0] + [0.0] * len(row["negatives"]))
            for row in rows
        ]
    found: dict[str, tuple[list[str], list[float]]] = {}
    for row in rows:
        texts, labels = found.setdefault(row["query"], ([], []))
        texts.append(row["text"])
        labels.append(row["label"])
    return [(query, *parts) for query, parts in found.items()]
