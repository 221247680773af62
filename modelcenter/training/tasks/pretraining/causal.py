"""Causal pretraining: the next token, over all tokens of all documents."""

from collections.abc import Iterator
from typing import Any, ClassVar

import engine
from modelcenter.data.pretraining.objectives import Causal, Objective
from modelcenter.models.base import Model
from modelcenter.training.inference.text_generation import complete, map_over_ranks, with_batch_seed
from modelcenter.training.tasks.base import strings
from modelcenter.training.tasks.pretraining.base import Pretraining


class CausalPretraining(Pretraining):
    """Causal pretraining. Flags: PretrainLMConfig."""

    name: ClassVar[str] = "pretrain-lm"
    head: ClassVar[str] = "causal-lm"

    context = False  # whether batches must say that no token is context

    def attach(self, model: Model) -> None:
        self.context = getattr(model, "usual", {}).get("context") == 1

    def objective(self, tokenizer: Any, max_length: int, seed: int) -> Objective:
        return Causal(max_length, self.context)

    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        self.attach(model)
        return super().rows_for(model, tokenizer, max_length)

    def prompt_examples(self, model: Model, tokenizer: Any, max_length: int, table: Any, column: str) -> Any:
        return encode_prompts(tokenizer, table, column, max_length, special=False)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """The text that goes on from each row."""

        def work(rows: list[int]) -> list[list[str]]:
            return complete(model, tokenizer, [examples[i] for i in rows], **with_batch_seed(cfg.search(), rows[0]))

        texts = map_over_ranks(len(examples), cfg.batch_size, work)
        several = cfg.num_return_sequences > 1
        found = ({"texts": row} if several else {"text": row[0]} for row in texts)
        return found if engine.rank() == 0 else iter(())


def encode_prompts(tokenizer: Any, table: Any, column: str, max_length: int, special: bool) -> list[list[int]]:
    """The tokens of each text.

    Raises:
        ValueError: a row without text, or longer than the model takes.
    """
    rows = []
    for i, text in enumerate(strings(table, column)):
        ids = tokenizer(text, add_special_tokens=special)["input_ids"]
        if not text.strip() or not ids:
            raise ValueError(f"{table.where(i)}: the row has no text in column {column!r}")
        if len(ids) > max_length:
            raise ValueError(f"{table.where(i)}: the row has {len(ids)} tokens, max_length is {max_length}; shorten it")
        rows.append(ids)
    return rows
