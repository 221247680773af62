"""T5's pretraining: spans are hidden from the encoder, and the decoder says what they were."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import engine
from modelcenter.data.pretraining.objectives import Objective, Spans
from modelcenter.data.pretraining.span_corruption import SpanCorruption, sentinels_of
from modelcenter.models.base import Model
from modelcenter.training.config import SpanCorruptionConfig
from modelcenter.training.inference.text_generation import complete_ids, map_over_ranks, with_batch_seed
from modelcenter.training.tasks.base import decoder_token
from modelcenter.training.tasks.pretraining.base import Pretraining, end_of
from modelcenter.training.tasks.pretraining.causal import encode_prompts


class SpanCorruptionPretraining(Pretraining):
    """Span corruption. Flags: SpanCorruptionConfig."""

    name: ClassVar[str] = "span-corruption"
    head: ClassVar[str] = "seq2seq-lm"
    cfg: SpanCorruptionConfig

    def special_tokens(self, tokenizer: Any) -> dict[str, Any]:
        sentinels_of(tokenizer)
        pad, first = decoder_token(tokenizer, "pad", "starts"), tokenizer.bos_token_id  # CPM-2 has the latter
        return super().special_tokens(tokenizer) | {"decoder_start_token_id": pad if first is None else first}

    def objective(self, tokenizer: Any, max_length: int, seed: int) -> Objective:
        sizes = (self.cfg.noise_density, self.cfg.mean_span)
        return Spans(SpanCorruption(sentinels_of(tokenizer), max_length, end_of(tokenizer), *sizes), seed)

    def prompt_examples(
        self, model: Model, tokenizer: Any, max_length: int, table: Any, column: str
    ) -> list[list[int]]:
        self.sentinels = sentinels_of(tokenizer).tolist()
        rows = encode_prompts(tokenizer, table, column, max_length, special=True)
        known = set(self.sentinels)
        for i, ids in enumerate(rows):
            if known.isdisjoint(ids):
                mark = tokenizer.convert_ids_to_tokens(self.sentinels[0])
                raise ValueError(f"{table.where(i)}: the row has no sentinel to fill; put {mark} where text is missing")
        return rows

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """What stands at each sentinel, by its name, and the text with it filled in."""

        def work(rows: list[int]) -> list[dict[str, Any]]:
            search = with_batch_seed(cfg.search(), rows[0])
            found = complete_ids(model, tokenizer, [examples[i] for i in rows], **search)
            return [self.filled(tokenizer, examples[i], several[0]) for i, several in zip(rows, found, strict=True)]

        said = map_over_ranks(len(examples), cfg.batch_size, work)
        return iter(said) if engine.rank() == 0 else iter(())

    def filled(self, tokenizer: Any, asked: list[int], answer: list[int]) -> dict[str, Any]:
        """The spans of an answer, and the text that they complete."""
        spans: dict[int, list[int]] = {}
        last: list[int] | None = None
        special = set(tokenizer.all_special_ids) - set(self.sentinels)
        for token in answer:
            if token in self.sentinels:
                last = None if token in spans else spans.setdefault(token, [])
            elif token == tokenizer.eos_token_id:
                break
            elif last is not None and token not in special:
                last.append(token)
        wanted = [token for token in asked if token in self.sentinels]
        whole = [
            t for token in asked if token not in special for t in (spans.get(token, []) if token in wanted else [token])
        ]
        names = tokenizer.convert_ids_to_tokens(wanted)
        texts = [tokenizer.decode(spans.get(token, [])).strip() for token in wanted]
        text = re.sub(r"\s+", " ", tokenizer.decode(whole)).strip()
        return {"spans": dict(zip(names, texts, strict=True)), "text": text}
