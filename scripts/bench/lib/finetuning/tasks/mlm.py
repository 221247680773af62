"""Lines of Shakespeare with words masked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.tasks.base import LONGEST, Rows, Task
from scripts.bench.lib.flops import Row

MASKED = 0.15


class MaskedLM(Task):
    model_task = "masked-lm"
    data_name = "tiny Shakespeare"
    path = "tinyshakespeare/input.txt"
    lr = 5e-4
    speed = 2.0
    script = "pretrain_mlm.py"
    flags = {"max_length": LONGEST, "mask_fraction": MASKED}
    suffix = ".txt"
    judged_by = ("loss",)

    def parse(self, path: Path, split: str) -> Rows:
        lines = [{"text": x} for x in path.read_text(encoding="utf-8").splitlines() if len(x.split()) > 1]
        cut = len(lines) * 19 // 20
        return lines[:cut] if split == "train" else lines[cut:]

    def of_samples(self, samples: Rows) -> Rows:
        return [{"text": row["text"]} for row in samples]

    def write(self, rows: Rows, path: Path) -> None:
        path.with_suffix(self.suffix).write_text("".join(f"{row['text']}\n" for row in rows), encoding="utf-8")

    def read_back(self, path: Path) -> Rows:
        return [{"text": line} for line in path.with_suffix(self.suffix).read_text(encoding="utf-8").splitlines()]

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=LONGEST)["input_ids"]
        return [{"input_ids": x} for x in ids]

    def sizes(self, encoded: Mapping[str, Any]) -> list[Row]:
        count = len(encoded["input_ids"])
        return [Row(count, 0, round(MASKED * count))]

    def collator(self, kind: str, tokenizer: Any, model: Any) -> Any:
        import transformers

        return transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED)
