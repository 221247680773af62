"""T5's pretraining: spans are removed from the encoder's input, and the decoder generates them."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import engine
from modelcenter.data.pretraining.objectives import Objective, Spans
from modelcenter.data.pretraining.span_corruption import SpanCorruption, sentinels_of
from modelcenter.models.base import Model
from modelcenter.training.config import SpanCorruptionConfig
from modelcenter.training.inference.text_generation import complete_ids_of_rows
from modelcenter.training.tasks.base import decoder_token
from modelcenter.training.tasks.pretraining.base import Pretraining, document_end
from modelcenter.training.tasks.pretraining.prompts import encode_prompts


@dataclass(eq=False, kw_only=True, repr=False)
class SpanCorruptionPretraining(Pretraining):
    """Span corruption. Flags: SpanCorruptionConfig."""

    name: ClassVar[str] = "span-corruption"
    head: ClassVar[str] = "seq2seq-lm"
    cfg: SpanCorruptionConfig

    def special_tokens(self, tokenizer: Any) -> dict[str, Any]:
        sentinels_of(tokenizer)
        pad, first = decoder_token(tokenizer, "pad", "starts"), tokenizer.bos_token_id  # CPM-2 has a bos token
        return super().special_tokens(tokenizer) | {"decoder_start_token_id": pad if first is None else first}

    def objective(self, tokenizer: Any, max_length: int, seed: int) -> Objective:
        sizes = (self.cfg.noise_density, self.cfg.mean_span)
        return Spans(SpanCorruption(sentinels_of(tokenizer), max_length, document_end(tokenizer), *sizes), seed)

    def prompt_examples(self, tokenizer: Any, max_length: int, table: Any, column: str) -> list[list[int]]:
        sentinels = sentinels_of(tokenizer).tolist()
        rows = encode_prompts(tokenizer, table, column, max_length, special=True)
        for i, ids in enumerate(rows):
            if set(sentinels).isdisjoint(ids):
                name = tokenizer.convert_ids_to_tokens(sentinels[0])
                raise ValueError(f"{table.where(i)}: the row has no sentinel to fill; put {name} where text is missing")
        return rows

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """{sentinel: its text}, and the row with the texts filled in; if num_return_sequences is above 1, predictions,
        a list of these."""
        sentinels = set(sentinels_of(tokenizer).tolist())
        answers = complete_ids_of_rows(model, tokenizer, examples, cfg.batch_size, **cfg.search())
        filled = [
            [fill_spans(tokenizer, sentinels, prompt, answer) for answer in of_row]
            for prompt, of_row in zip(examples, answers, strict=True)
        ]
        predictions = (row[0] if len(row) == 1 else {"predictions": row} for row in filled)
        return predictions if engine.rank() == 0 else iter(())


def fill_spans(tokenizer: Any, sentinels: Collection[int], prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """The spans of an answer by the sentinels of its prompt, and the completed text. sentinels: all sentinel tokens of
    the tokenizer."""
    spans: dict[int, list[int]] = {}
    span: list[int] | None = None
    special = set(tokenizer.all_special_ids) - set(sentinels)
    for token in answer:
        if token in sentinels:
            span = None if token in spans else spans.setdefault(token, [])
        elif token == tokenizer.eos_token_id:
            break
        elif span is not None and token not in special:
            span.append(token)
    hidden = [token for token in prompt if token in sentinels]
    filled = [
        t for token in prompt if token not in special for t in (spans.get(token, []) if token in hidden else [token])
    ]
    names = tokenizer.convert_ids_to_tokens(hidden)
    texts = [tokenizer.decode(spans.get(token, [])).strip() for token in hidden]
    text = re.sub(r"\s+", " ", tokenizer.decode(filled)).strip()
    return {"spans": dict(zip(names, texts, strict=True)), "text": text}
