"""Tagging the words of E2E's texts that state the facts (the restaurant's name, its area, its food, ...), as BIO
tags."""

from collections.abc import Mapping
from typing import Any

from scripts.bench.lib.finetuning.tasks.base import LONGEST, Rows
from scripts.bench.lib.finetuning.tasks.e2e import E2ETask, slots, words


class TokenClassification(E2ETask):
    model_task = "token-classification"
    lr = 3e-4
    script = "finetune_token_classification.py"
    flags = {"max_length": LONGEST}

    def of_pairs(self, pairs: Rows) -> Rows:
        return [_tagged(pair["ref"], slots(pair["mr"])) for pair in pairs]

    def texts(self, row: Mapping[str, Any]) -> list[str]:
        return [" ".join(row["tokens"])]

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        """The first token of a word has the word's tag."""
        numbers = {name: i for i, name in enumerate(_names(rows if known is None else known))}
        tokens = [row["tokens"] for row in rows]
        found = tokenizer(tokens, is_split_into_words=True, truncation=True, max_length=LONGEST)
        encoded = []
        for i, row in enumerate(rows):
            places, seen, labels = found.word_ids(i), set(), []
            for place in places:
                labels.append(-100 if place is None or place in seen else numbers.get(row["tags"][place], -100))
                seen.add(place)
            encoded.append({"input_ids": found["input_ids"][i], "labels": labels})
        return encoded

    def head(self, rows: Rows) -> dict[str, Any]:
        names = _names(rows)
        return {"num_labels": len(names), "id2label": dict(enumerate(names))}

    def collator(self, kind: str, tokenizer: Any, model: Any) -> Any:
        import transformers

        return transformers.DataCollatorForTokenClassification(tokenizer)


def _tagged(text: str, known: Mapping[str, str]) -> dict[str, Any]:
    tokens = words(text)
    tags = ["O"] * len(tokens)
    for slot, value in known.items():
        part, name = words(value), slot.replace(" ", "_")
        for at in range(len(tokens) - len(part) + 1):
            if part and tokens[at : at + len(part)] == part and set(tags[at : at + len(part)]) == {"O"}:
                tags[at : at + len(part)] = [f"B-{name}", *[f"I-{name}"] * (len(part) - 1)]
    return {"tokens": tokens, "tags": tags}


def _names(rows: Rows) -> list[str]:
    return sorted({tag for row in rows for tag in row["tags"]})
