"""Rows of texts that belong together, small enough to train on in a test."""

import random

import pytest
import torch
from toydata import WORDS, make_tokenizer, write_jsonl

from modelcenter.training.contrastive import ANCHOR, POSITIVE

_ALL = [word for words in WORDS.values() for word in words]


def make_related(count: int, seed: int, negatives: int = 0, scored: bool = False) -> list[dict]:
    """Rows of a query and a positive that share words. Every fifth query and every seventh positive repeat those of
    other rows."""
    rng = random.Random(seed)
    rows: list[dict] = []
    for i in range(count):
        query = rng.sample(_ALL, rng.randint(2, 6))
        positive = [*rng.sample(query, 2), *rng.sample(_ALL, rng.randint(1, 7))]
        row = {"query": " ".join(query), "positive": " ".join(positive)}
        if i % 5 == 4:
            row["query"] = rows[i - 3]["query"]
        if i % 7 == 6:
            row["positive"] = rows[i - 2]["positive"]
        if scored:
            row["score"] = rng.choice([0.5, 1, 2.5, 4])
        if negatives:
            row["negatives"] = [" ".join(rng.sample(_ALL, rng.randint(2, 8))) for _ in range(rng.randint(0, negatives))]
        rows.append(row)
    return rows


def write_related(folder, train: int = 24, dev: int = 11, **kinds) -> list[dict]:
    """Write data/train.jsonl, data/dev.jsonl and tokenizer/; returns the rows to train on."""
    rows = make_related(train, 1, **kinds)
    write_jsonl(folder / "data" / "train.jsonl", rows)
    write_jsonl(folder / "data" / "dev.jsonl", make_related(dev, 2, **kinds))
    make_tokenizer().save_pretrained(folder / "tokenizer")
    return rows


def random_pairs(numbers) -> dict[str, torch.Tensor]:
    """A packed batch of rows with these numbers: an anchor and a positive of random tokens, of unequal lengths."""
    texts = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        texts += [torch.randint(5, 60, (3 + (number + 2 * i) % 5,), generator=generator) for i in range(2)]
    return {
        "input_ids": torch.cat(texts)[None],
        "cu_seqlens": torch.tensor([0, *map(len, texts)]).cumsum(0).int(),
        "roles": torch.tensor([ANCHOR, POSITIVE] * len(numbers)),
        "text_ids": torch.tensor([2 * number + i for number in numbers for i in range(2)]),
    }


def assert_same(found, expected):
    """Assert that two (loss, {name: gradient}, ...) are equal up to rounding."""
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        rounding = 5e-6 * max(1.0, grad.abs().max().item())
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=rounding, msg=name)
