"""Masked-language-model pretraining: hidden tokens, and BERT's next sentence."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import engine
from modelcenter.data.pretraining.masking import IGNORED, Masking, Words
from modelcenter.data.pretraining.objectives import Masked, Objective, Paired, labelled_batch, sentence_ends
from modelcenter.data.tokenization.special_tokens import SpecialTokens
from modelcenter.models.base import Model
from modelcenter.training.config import MLMConfig
from modelcenter.training.evaluation import evaluate
from modelcenter.training.metrics import LanguageModel, Metrics, sum_over_ranks, sums
from modelcenter.training.tasks.base import Batches, rank_batches
from modelcenter.training.tasks.pretraining.base import Pretraining
from modelcenter.training.tasks.pretraining.prompts import encode_prompts

_TOP_K = 5  # predictions for each mask, unless top_k is given


class MaskedMetrics:
    """perplexity and accuracy of the hidden tokens; next_sentence_accuracy of pairs of sentences."""

    main = "perplexity"

    def __init__(self, pairs: bool):
        self.tokens, self.has_pairs = LanguageModel(causal=False), pairs
        self.pairs = [0, 0]  # all, right

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits (n, vocabulary), targets (n,)."""
        self.tokens.update(logits, targets)

    def add_pairs(self, right: Tensor) -> None:
        """right: bool (n,), whether the prediction of each pair is."""
        self.pairs[0] += len(right)
        self.pairs[1] += int(right.sum())

    def result(self) -> dict[str, float | None]:
        result = self.tokens.result()
        del result["loss"]  # of several terms, it is not the perplexity's
        if self.has_pairs:
            total, right = sums(self.pairs)
            result["next_sentence_accuracy"] = right / total if total else None
        return result


@dataclass(eq=False, kw_only=True, repr=False)
class MaskedPretraining(Pretraining):
    """Masked-language-model pretraining. Flags: MLMConfig."""

    name: ClassVar[str] = "mlm"
    evaluated_logits: ClassVar[bool | str] = "labelled"
    cfg: MLMConfig

    @property
    def head(self) -> str:
        return "pretraining" if self.cfg.next_sentence else "masked-lm"

    def on_model_built(self, model: Model) -> None:
        """Raises ValueError for a model whose pretraining is of another kind."""
        if model.task == "pretraining" and "next_sentence_label" not in model.head_inputs["pretraining"]:
            raise ValueError(
                f"model: pretraining of {model.config.model_type} is telling which tokens were replaced, which this "
                "task does not do; mlm without --next_sentence trains its generator, a masked language model"
            )

    def objective(self, tokenizer: Any, max_length: int, seed: int) -> Objective:
        words: Words = "none"
        if self.cfg.whole_word:
            words = "words" if self.cfg.word_segmenter == "none" else self.cfg.word_segmenter
        masking = Masking(tokenizer, self.cfg.mask_fraction, words)
        if not self.cfg.next_sentence:
            return Masked(masking, SpecialTokens.of(tokenizer), max_length, seed)
        return Paired(masking, SpecialTokens.of(tokenizer, pair=True), max_length, seed, sentence_ends(tokenizer))

    def metrics(self, device: torch.device | str = "cpu") -> Metrics:
        return MaskedMetrics(self.cfg.next_sentence)

    def update_metrics(self, metrics: Any, out: Any, batch: dict[str, Any]) -> None:
        labels = batch["labels"]
        metrics.update(out.logits, labels[labels != IGNORED])
        if self.cfg.next_sentence:
            metrics.add_pairs(out.seq_relationship_logits.argmax(-1) == batch["next_sentence_label"])

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        self.on_model_built(model)
        self.cfg.next_sentence = model.task == "pretraining"
        return super().inference_examples(model, tokenizer, max_length)

    def prompt_examples(self, tokenizer: Any, max_length: int, table: Any, column: str) -> "MaskedTexts":
        rows = encode_prompts(tokenizer, table, column, max_length, special=True)
        mask = tokenizer.mask_token_id
        for i, ids in enumerate(rows):
            if mask not in ids:
                raise ValueError(
                    f"{table.where(i)}: the row has no {tokenizer.mask_token} to fill; put it where a token is missing"
                )
        return MaskedTexts([np.array(ids, np.int64) for ids in rows], mask, self.cfg.next_sentence)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """For each mask of a row the most probable tokens with their probabilities, and the row with the first ones."""
        count = min(cfg.top_k or _TOP_K, model.config.vocab_size)
        rows = rank_batches(examples, cfg.batch_size)
        best = BestTokens(examples, rows, count)
        batches = Batches(examples, rows, self.evaluated_logits)
        evaluate(model, batches, best, lambda metrics, out, batch: metrics.update(out.logits))
        return best.predictions(tokenizer) if engine.rank() == 0 else iter(())


class MaskedTexts:
    """Texts with masks, which are the tokens that have a label."""

    def __init__(self, ids: list[np.ndarray], mask: int, pairs: bool):
        self.ids, self.mask, self.pairs = ids, mask, pairs

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.ids], np.int64)

    def masks(self, row: int) -> np.ndarray:
        """The places of the masks of a row."""
        return np.flatnonzero(self.ids[row] == self.mask)

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        ids = [self.ids[row] for row in rows]
        batch = labelled_batch(ids, [np.where(row == self.mask, 0, IGNORED) for row in ids])
        return batch | {"next_sentence_label": torch.full((len(rows),), IGNORED)} if self.pairs else batch


class BestTokens:
    """The most probable tokens at each mask of all rows: metrics that are updated batch by batch, in the order of
    `rows`."""

    main = ""

    def __init__(self, examples: MaskedTexts, rows: list[np.ndarray], count: int):
        self.examples, self.rows, self.batches_seen = examples, rows, 0
        self.starts = np.concatenate(([0], np.cumsum([len(examples.masks(i)) for i in range(len(examples))])))
        self.tokens = torch.zeros(int(self.starts[-1]), count, dtype=torch.int64)
        self.probabilities = torch.zeros(int(self.starts[-1]), count)

    def update(self, logits: Tensor) -> None:
        """logits (masks, vocabulary), of the next batch."""
        rows = self.rows[self.batches_seen]
        places = np.concatenate([np.arange(self.starts[row], self.starts[row + 1]) for row in rows])
        best = logits.float().softmax(-1).topk(self.probabilities.shape[1])
        self.tokens[places], self.probabilities[places] = best.indices.cpu(), best.values.cpu()
        self.batches_seen += 1

    def result(self) -> dict[str, float | None]:
        """A mask is zero on all ranks but one, so the sums are exact."""
        self.tokens, self.probabilities = sum_over_ranks(self.tokens), sum_over_ranks(self.probabilities)
        return {}

    def predictions(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """A line for each row, after `result`."""
        for row in range(len(self.examples)):
            part = slice(self.starts[row], self.starts[row + 1])
            tokens, probabilities = self.tokens[part].tolist(), self.probabilities[part].tolist()
            masks = [
                [{"token": tokenizer.decode([t]).strip(), "score": round(p, 6)} for t, p in zip(*best, strict=True)]
                for best in zip(tokens, probabilities, strict=True)
            ]
            ids = self.examples.ids[row].copy()
            ids[self.examples.masks(row)] = [best[0] for best in tokens]
            yield {"text": tokenizer.decode(ids.tolist(), skip_special_tokens=True), "masks": masks}
