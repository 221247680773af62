"""Embeddings: a BERT learns to find E2E's text about a restaurant by the facts about it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.tasks.base import LONGEST, Rows
from scripts.bench.lib.finetuning.tasks.e2e import E2ETask
from scripts.bench.lib.flops import Row

ROLES = ("anchor", "positive")
SCALE = 20.0  # temperature of cosines: the default of both sides
ROWS = 512  # a multiple of the batch sizes 32 and 256


class Embedding(E2ETask):
    """Rows of an anchor and its positive; no two rows have a text in common.

    Otherwise sentence-transformers would use another row's positive of the same anchor as a negative, and this project
    would not; for these rows both compute the same loss.
    """

    model_task = "embedding"
    lr = 2e-4
    speed = 1.5
    script = "finetune_embedding.py"
    flags = {"max_length": LONGEST}
    peer = "st_embedding"
    environment = "sentence-transformers"
    peers = {"sentence-transformers": "default", "sentence-transformers, grouped by length": "grouped"}

    def of_pairs(self, pairs: Rows) -> Rows:
        return [{"anchor": pair["mr"], "positive": pair["ref"]} for pair in pairs]

    def read(self, data: str | None, split: str) -> Rows:
        seen: set[str] = set()
        rows = []
        for row in super().read(data, split):
            if seen.isdisjoint(row.values()):
                seen.update(row.values())
                rows.append(row)
        return rows[:ROWS]

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        """Encodes a row: its `texts` are the tokens of its anchor and of its positive."""
        columns = (
            tokenizer([row[role] for row in rows], truncation=True, max_length=LONGEST)["input_ids"] for role in ROLES
        )
        return [{"texts": list(texts)} for texts in zip(*columns, strict=True)]

    def sizes(self, encoded: Mapping[str, Any]) -> list[Row]:
        return [Row(len(ids)) for ids in encoded["texts"]]

    def collator(self, kind: str, tokenizer: Any, model: Any) -> Any:
        """A batch of all anchors, then all positives."""
        import transformers

        collate = transformers.DataCollatorWithPadding(tokenizer)
        return lambda rows: collate([{"input_ids": row["texts"][i]} for i in range(len(ROLES)) for row in rows])

    def tokens(self, inputs: Mapping[str, Any]) -> int:
        """The number of tokens in all columns."""
        return sum(int(mask.sum()) for name, mask in inputs.items() if name.endswith("attention_mask"))

    def judge(self, model: Any, batch: Any, start: Path) -> tuple[float, int, int]:
        """As `judge`: whether anchors find their positives among those of a batch."""
        import torch
        import torch.nn.functional as F

        mask = batch["attention_mask"][..., None]
        means = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        anchors, positives = F.normalize(means, dim=-1).chunk(2)
        scores, right = SCALE * anchors @ positives.T, torch.arange(len(anchors))
        total = F.cross_entropy(scores, right, reduction="sum").item()
        return total, len(anchors), int((scores.argmax(-1) == right).sum())
