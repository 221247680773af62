"""Choosing the one of four texts of E2E that is about a restaurant."""

import random
from collections.abc import Mapping
from typing import Any

from scripts.bench.lib.finetuning.tasks.base import LONGEST, Rows
from scripts.bench.lib.finetuning.tasks.e2e import E2ETask
from scripts.bench.lib.flops import Row

CHOICES = 4


class MultipleChoice(E2ETask):
    model_task = "multiple-choice"
    lr = 1e-4
    script = "finetune_multiple_choice.py"
    flags = {"max_length": LONGEST}

    def of_pairs(self, pairs: Rows) -> Rows:
        draw, rows = random.Random(0), []
        for pair in pairs:
            choices = [draw.choice(pairs)["ref"] for _ in range(CHOICES - 1)]
            label = draw.randrange(CHOICES)
            choices.insert(label, pair["ref"])
            rows.append({"context": pair["mr"], "choices": choices, "label": label})
        return rows

    def texts(self, row: Mapping[str, Any]) -> list[str]:
        return [row["context"], *row["choices"]]

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        contexts = [row["context"] for row in rows for _ in row["choices"]]
        choices = [choice for row in rows for choice in row["choices"]]
        found = tokenizer(contexts, choices, truncation=True, max_length=LONGEST)
        parts = [slice(i * CHOICES, (i + 1) * CHOICES) for i in range(len(rows))]
        names = ("input_ids", "token_type_ids")
        return [
            {**{name: found[name][part] for name in names}, "labels": row["label"]}
            for row, part in zip(rows, parts, strict=True)
        ]

    def sizes(self, encoded: Mapping[str, Any]) -> list[Row]:
        return [Row(len(ids)) for ids in encoded["input_ids"]]

    def collator(self, kind: str, tokenizer: Any, model: Any) -> Any:
        import transformers

        return transformers.DataCollatorForMultipleChoice(tokenizer)
