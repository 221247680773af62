"""A T5 learns to generate E2E's texts from the facts."""

from collections.abc import Mapping
from typing import Any

from scripts.bench.lib.finetuning import tokenizers
from scripts.bench.lib.finetuning.tasks.base import Rows
from scripts.bench.lib.finetuning.tasks.e2e import E2EColumns
from scripts.bench.lib.flops import Row


class Seq2Seq(E2EColumns):
    model_task = "seq2seq-lm"
    words = 32128
    lr = 1e-3
    speed = 1.5
    script = "finetune_seq2seq.py"
    flags = {"source_column": "source", "target_column": "target"}
    tokenizer = staticmethod(tokenizers.unigram)
    judged_by = ("loss",)

    def configuration(self, hidden: int, layers: int, words: int) -> Any:
        import transformers

        return transformers.T5Config(
            vocab_size=words, d_model=hidden, d_ff=4 * hidden, d_kv=64, num_heads=hidden // 64, num_layers=layers,
            decoder_start_token_id=0,
        )  # fmt: skip

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        return [{"input_ids": x, "labels": y} for x, y in zip(*self.ids(tokenizer, rows), strict=True)]

    def sizes(self, encoded: Mapping[str, Any]) -> list[Row]:
        target = len(encoded["labels"])
        return [Row(len(encoded["input_ids"]), target, target)]

    def collator(self, kind: str, tokenizer: Any, model: Any) -> Any:
        import transformers

        return transformers.DataCollatorForSeq2Seq(tokenizer, model=model)

    def tokens(self, inputs: Mapping[str, Any]) -> int:
        """The number of tokens on both sides, without padding."""
        return super().tokens(inputs) + int((inputs["labels"] != -100).sum())
