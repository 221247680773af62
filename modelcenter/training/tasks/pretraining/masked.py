"""Masked-language-model pretraining, with BERT's next-sentence or ALBERT's sentence-order prediction."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import engine
from modelcenter.data.pretraining.masking import IGNORED, Masking, Words
from modelcenter.data.pretraining.objectives import (
    Masked,
    NextSentence,
    Objective,
    Pairs,
    SentenceOrder,
    labelled_batch,
    sentence_ends,
)
from modelcenter.data.tokenization.special_tokens import SpecialTokens
from modelcenter.models.base import Model
from modelcenter.training.config import MLMConfig
from modelcenter.training.evaluation import evaluate
from modelcenter.training.metrics import LanguageModel, Metrics, sum_over_ranks, sums
from modelcenter.training.tasks.examples import Batches, rank_batches
from modelcenter.training.tasks.pretraining.base import Pretraining
from modelcenter.training.tasks.pretraining.prompts import encode_prompts

# {flag of a second task: how its examples are built}. Its metric is <flag>_accuracy, its label <flag>_label.
PAIRS: dict[str, type[Pairs]] = {"next_sentence": NextSentence, "sentence_order": SentenceOrder}
_LOGITS = {"next_sentence": "seq_relationship_logits", "sentence_order": "sop_logits"}
_TOP_K = 5  # default number of predictions per mask


class MaskedMetrics:
    """perplexity and accuracy of the masked tokens; next_sentence_accuracy or sentence_order_accuracy of pairs.

    second: one of PAIRS; None: no pairs.
    """

    main = "perplexity"

    def __init__(self, second: str | None):
        self.tokens, self.second = LanguageModel(causal=False), second
        self.pairs = [0, 0]  # all, right

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits (n, vocabulary), targets (n,)."""
        self.tokens.update(logits, targets)

    def add_pairs(self, right: Tensor) -> None:
        """right: bool (n,), whether the prediction for each pair is right."""
        self.pairs[0] += len(right)
        self.pairs[1] += int(right.sum())

    def result(self) -> dict[str, float | None]:
        result = self.tokens.result()
        del result["loss"]  # the model's loss is not this one if it has several terms
        if self.second is not None:
            total, right = sums(self.pairs)
            result[f"{self.second}_accuracy"] = right / total if total else None
        return result


@dataclass(eq=False, kw_only=True, repr=False)
class MaskedPretraining(Pretraining):
    """Masked-language-model pretraining. Flags: MLMConfig."""

    name: ClassVar[str] = "mlm"
    evaluated_logits: ClassVar[bool | str] = "labelled"
    cfg: MLMConfig

    @property
    def second(self) -> str | None:
        """The second task, one of PAIRS."""
        return next((flag for flag in PAIRS if getattr(self.cfg, flag)), None)

    @property
    def head(self) -> str:
        return "masked-lm" if self.second is None else "pretraining"

    def on_model_built(self, model: Model) -> None:
        """Raise ValueError for a model with another kind of pretraining."""
        if model.task != "pretraining":
            return
        kind, own = model.config.model_type, _second_task(model)
        if own is None:
            raise ValueError(
                f"model: {kind} is pretrained to detect replaced tokens, which this task does not do; `pretrain "
                "replaced-tokens` trains a discriminator and its generator, mlm without a second task only a generator"
            )
        if own != self.second:
            raise ValueError(f"{self.second}: {kind} has another second task; give {own} instead")

    def objective(self, tokenizer: Any, max_length: int, seed: int) -> Objective:
        words: Words = "none"
        if self.cfg.whole_word:
            words = "words" if self.cfg.word_segmenter == "none" else self.cfg.word_segmenter
        masking = Masking(tokenizer, self.cfg.mask_fraction, words)
        if self.second is None:
            return Masked(masking, SpecialTokens.of(tokenizer), max_length, seed)
        special = SpecialTokens.of(tokenizer, pair=True)
        return PAIRS[self.second](masking, special, max_length, seed, sentence_ends(tokenizer))

    def metrics(self, device: torch.device | str = "cpu") -> Metrics:
        return MaskedMetrics(self.second)

    def update_metrics(self, metrics: Any, out: Any, batch: dict[str, Any]) -> None:
        labels = batch["labels"]
        metrics.update(out.logits, labels[labels != IGNORED])
        if self.second is not None:
            metrics.add_pairs(out[_LOGITS[self.second]].argmax(-1) == batch[PAIRS[self.second].label])

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        for flag in PAIRS:
            setattr(self.cfg, flag, model.task == "pretraining" and flag == _second_task(model))
        self.on_model_built(model)
        return super().inference_examples(model, tokenizer, max_length)

    def prompt_examples(self, tokenizer: Any, max_length: int, table: Any, column: str) -> "MaskedTexts":
        rows = encode_prompts(tokenizer, table, column, max_length, special=True)
        mask = tokenizer.mask_token_id
        for i, ids in enumerate(rows):
            if mask not in ids:
                raise ValueError(
                    f"{table.where(i)}: the row has no {tokenizer.mask_token} to fill; put it where a token is missing"
                )
        label = None if self.second is None else PAIRS[self.second].label
        return MaskedTexts([np.array(ids, np.int64) for ids in rows], mask, label)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """The most probable tokens for each mask of a row, with probabilities, and the row with the best filled in."""
        count = min(cfg.top_k or _TOP_K, model.config.vocab_size)
        rows = rank_batches(examples, cfg.batch_size)
        best = BestTokens(examples, rows, count)
        batches = Batches(examples, rows, self.evaluated_logits)
        evaluate(model, batches, best, lambda metrics, out, batch: metrics.update(out.logits))
        return best.predictions(tokenizer) if engine.rank() == 0 else iter(())


def _second_task(model: Model) -> str | None:
    """The second task of a pretraining model, one of PAIRS."""
    inputs = model.head_inputs["pretraining"]
    return next((flag for flag, objective in PAIRS.items() if objective.label in inputs), None)


class MaskedTexts:
    """Texts with masks; only masks have labels. pair_label: an input that the head requires, filled with "no label"."""

    def __init__(self, ids: list[np.ndarray], mask: int, pair_label: str | None):
        self.ids, self.mask, self.pair_label = ids, mask, pair_label

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.ids], np.int64)

    def masks(self, row: int) -> np.ndarray:
        """The positions of the masks in a row."""
        return np.flatnonzero(self.ids[row] == self.mask)

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        ids = [self.ids[row] for row in rows]
        batch = labelled_batch(ids, [np.where(row == self.mask, 0, IGNORED) for row in ids])
        return batch if self.pair_label is None else batch | {self.pair_label: torch.full((len(rows),), IGNORED)}


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
        """Combine the ranks: each mask is zero on all ranks but one, so the sums are exact."""
        self.tokens, self.probabilities = sum_over_ranks(self.tokens), sum_over_ranks(self.probabilities)
        return {}

    def predictions(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """One line per row; call it after `result`."""
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
