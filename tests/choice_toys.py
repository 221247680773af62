"""Toy rows of multiple choice."""

import random

from toydata import WORDS, make_tokenizer, write_jsonl


def make_rows(count: int, seed: int, sizes: tuple[int, ...]) -> list[dict]:
    """Rows whose right choice is the only one with a good word."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        right, size = 0, rng.choice(sizes)
        choices = [
            " ".join([rng.choice(WORDS["bad"]), *rng.choices(WORDS["both"], k=rng.randint(0, 3))]) for _ in range(size)
        ]
        right = rng.randrange(size)
        choices[right] = rng.choice(WORDS["good"])
        rows.append({"context": " ".join(rng.choices(WORDS["both"], k=rng.randint(2, 6))), "question": "the actor was",
                     "options": choices, "answer": "ABCD"[right]})  # fmt: skip
    return rows


def write(folder, *sizes: int):
    for name, count, seed in (("train", 21, 1), ("dev", 9, 2)):
        write_jsonl(folder / "data" / f"{name}.jsonl", make_rows(count, seed, sizes))
    make_tokenizer().save_pretrained(folder / "tokenizer")
    return folder
