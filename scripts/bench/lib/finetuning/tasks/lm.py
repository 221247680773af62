"""A GPT-2 learns to generate E2E's texts after the facts; its loss is on the texts only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning import tokenizers
from scripts.bench.lib.finetuning.tasks.base import TRAINER, Rows, judge_labels
from scripts.bench.lib.finetuning.tasks.e2e import E2EColumns
from scripts.bench.lib.flops import Row


def gpt2(hidden: int, layers: int, words: int) -> Any:
    """The configuration of a GPT-2 with heads of 64 channels."""
    import transformers

    return transformers.GPT2Config(
        vocab_size=words, n_positions=512, n_embd=hidden, n_layer=layers, n_head=hidden // 64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def answered(prompt: list[int], answer: list[int], end: int) -> dict[str, list[int]]:
    """The row of a decoder with the loss on the answer, which ends with `end`."""
    answer = [*answer, end]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def size_of(row: Mapping[str, Any]) -> Row:
    """The sizes of a row made by `answered`."""
    return Row(len(row["input_ids"]), 0, sum(label >= 0 for label in row["labels"]))


class LanguageModelling(E2EColumns):
    model_task = "causal-lm"
    words = 50257
    lr = 1e-3
    speed = 2.0
    script = "finetune_lm.py"
    flags = {"prompt_column": "source", "response_column": "target", "template": "none"}
    peers = {**TRAINER, "trainer, packed": "packed"}
    tokenizer = staticmethod(tokenizers.byte_level)
    judged_by = ("loss",)

    def configuration(self, hidden: int, layers: int, words: int) -> Any:
        return gpt2(hidden, layers, words)

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        sources, targets = self.ids(tokenizer, rows)
        return [answered(*pair, tokenizer.eos_token_id) for pair in zip(sources, targets, strict=True)]

    def sizes(self, encoded: Mapping[str, Any]) -> list[Row]:
        return [size_of(encoded)]

    def collator(self, kind: str, tokenizer: Any, model: Any) -> Any:
        import transformers

        if kind == "packed":
            return transformers.DataCollatorWithFlattening()
        return transformers.DataCollatorForSeq2Seq(tokenizer, model=model)

    def judge(self, model: Any, batch: Any, start: Path) -> tuple[float, int, int]:
        return judge_labels(model(**batch).logits[:, :-1], batch["labels"][:, 1:])
