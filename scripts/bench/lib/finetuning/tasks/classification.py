"""Sentences of SST-2 and their sentiment."""

from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.tasks.base import LONGEST, Rows, Task


class Classification(Task):
    model_task = "sequence-classification"
    data_name = "SST-2"
    path = "sst2/{split}.tsv"
    lr = 1e-4
    speed = 1.4
    script = "finetune_classification.py"
    flags = {"max_length": LONGEST}
    suffix = ".tsv"

    def parse(self, path: Path, split: str) -> Rows:
        lines = (line.partition("\t") for line in path.read_text(encoding="utf-8").splitlines())
        return [{"label": int(label), "text": text} for label, _, text in lines]

    def of_samples(self, samples: Rows) -> Rows:
        return [{"label": int(row["label"] == "positive"), "text": row["text"]} for row in samples]

    def write(self, rows: Rows, path: Path) -> None:
        lines = (f"{row['label']}\t{row['text']}\n" for row in rows)
        path.with_suffix(self.suffix).write_text("".join(lines), encoding="utf-8")

    def read_back(self, path: Path) -> Rows:
        return self.parse(path.with_suffix(self.suffix), "")

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=LONGEST)["input_ids"]
        return [{"input_ids": x, "labels": row["label"]} for x, row in zip(ids, rows, strict=True)]

    def head(self, rows: Rows) -> dict[str, Any]:
        return {"num_labels": 2}
