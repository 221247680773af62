"""Causal pretraining: next-token prediction over all tokens of all documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import engine
from modelcenter.data.pretraining.objectives import Causal, Objective
from modelcenter.data.tokenization.special_tokens import SpecialTokens
from modelcenter.models.base import Model
from modelcenter.training.inference.text_generation import complete_rows
from modelcenter.training.tasks.base import takes_tokens_for_context
from modelcenter.training.tasks.pretraining.base import Pretraining
from modelcenter.training.tasks.pretraining.prompts import encode_prompts


@dataclass(eq=False, kw_only=True, repr=False)
class CausalPretraining(Pretraining):
    """Causal pretraining. Flags: PretrainLMConfig.

    Attributes:
        context: whether batches must mark all tokens as no context; set when the model is known.
    """

    name: ClassVar[str] = "pretrain-lm"
    head: ClassVar[str] = "causal-lm"
    context: bool = False

    def on_model_built(self, model: Model) -> None:
        self.context = takes_tokens_for_context(model)

    def objective(self, tokenizer: Any, max_length: int, seed: int) -> Objective:
        return Causal(max_length, SpecialTokens.of(tokenizer).before, self.context)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        self.on_model_built(model)
        return super().inference_examples(model, tokenizer, max_length)

    def prompt_examples(self, tokenizer: Any, max_length: int, table: Any, column: str) -> Any:
        before = SpecialTokens.of(tokenizer).before  # as in training; special tokens after a text would end it
        rows = encode_prompts(tokenizer, table, column, max_length - len(before), special=False)
        return [[*before, *row] for row in rows]

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """The continuation of each row."""
        context = [0] * len(examples) if self.context else None
        texts = complete_rows(model, tokenizer, examples, cfg.batch_size, context=context, **cfg.search())
        several = cfg.num_return_sequences > 1
        predictions = ({"texts": row} if several else {"text": row[0]} for row in texts)
        return predictions if engine.rank() == 0 else iter(())
