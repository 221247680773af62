"""Examples of related texts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelcenter.data.batching.collate import pack
from modelcenter.training.contrastive import ANCHOR, NEGATIVE, POSITIVE
from modelcenter.training.tasks.examples import TokenExamples
from modelcenter.training.tasks.preview import shortened


@dataclass(frozen=True)
class TextExamples(TokenExamples):
    """Texts that may begin with prompts.

    prompt_lengths: int64, the number of tokens in each text's prompt, which are not pooled; None: all are pooled.
    """

    prompt_lengths: np.ndarray | None

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        return self.packed(rows)

    def packed(self, numbers: np.ndarray) -> dict[str, Any]:
        """The inputs of a model for the texts with these numbers."""
        batch: dict[str, Any] = pack(self.tokens, numbers)
        if self.prompt_lengths is not None:
            batch["prompt_lengths"] = torch.from_numpy(self.prompt_lengths[numbers])
        return batch


@dataclass(frozen=True)
class RelatedExamples(TextExamples):
    """Rows of an anchor, its positives and its negatives. `tokens` has all anchors, then all positives, then all
    negatives.

    first_positive, first_negative: int64 (rows + 1,), the number of the first of each row. text_ids: int64, equal for
    equal texts. scores: fp64 (rows,), or None. max_negatives: of a row in a batch.
    """

    first_positive: np.ndarray
    first_negative: np.ndarray
    text_ids: np.ndarray
    scores: np.ndarray | None = None
    max_negatives: int | None = None

    def __len__(self) -> int:
        return len(self.first_positive) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each row in an epoch that uses its longest texts."""
        lengths, rows = self.tokens.lengths, np.arange(len(self))
        longest = np.maximum.reduceat(lengths[: self.first_positive[-1]], self.first_positive[:-1])
        first, counts, taken = self._negatives(rows)
        row_of, negatives = np.repeat(rows, counts), lengths[self.first_negative[0] :]
        if self.max_negatives is not None:
            negatives = negatives[np.lexsort((-negatives, row_of))]  # row by row, the longest first
            place = np.arange(len(negatives)) - (first - self.first_negative[0])[row_of]
            negatives = negatives * (place < taken[row_of])
        return lengths[rows] + longest + np.bincount(row_of, negatives, len(rows)).astype(np.int64)

    def _negatives(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(number of the first negative, how many there are, how many a batch uses), for each of these rows."""
        first = self.first_negative[rows]
        counts = self.first_negative[rows + 1] - first
        return first, counts, counts if self.max_negatives is None else np.minimum(counts, self.max_negatives)

    def numbers(self, rows: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the texts that an epoch uses of these rows, row by row; their roles)."""
        rows = np.asarray(rows, np.int64)
        positives = self.first_positive[rows]
        positives = positives + epoch % (self.first_positive[rows + 1] - positives)
        first, counts, taken = self._negatives(rows)
        starts = np.concatenate(([0], np.cumsum(taken + 2)))  # of each row in the result
        numbers, roles = np.empty(starts[-1], np.int64), np.full(starts[-1], NEGATIVE)
        for place, (role, texts) in enumerate(((ANCHOR, rows), (POSITIVE, positives))):
            numbers[starts[:-1] + place], roles[starts[:-1] + place] = texts, role
        row_of = np.repeat(np.arange(len(rows)), taken)
        turn = epoch * taken[row_of] + np.arange(len(row_of)) - (np.cumsum(taken) - taken)[row_of]
        numbers[roles == NEGATIVE] = first[row_of] + turn % counts[row_of]
        return numbers, roles

    def facts(self, rows: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, dict[str, Tensor]]:
        """(numbers of the texts of these rows in an epoch, their entries in a batch: contrastive.TEXT_FACTS)."""
        numbers, roles = self.numbers(rows, epoch)
        facts = {"roles": torch.from_numpy(roles), "text_ids": torch.from_numpy(self.text_ids[numbers])}
        if self.scores is not None:
            facts["scores"] = torch.from_numpy(np.repeat(self.scores[rows], 2))
        return numbers, facts

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        numbers, facts = self.facts(rows, epoch)
        return {**self.packed(numbers), **facts}

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        return self.numbers(rows)[0]

    def show(self, row: int, tokenizer: Any) -> str:
        numbers, _ = self.numbers(np.array([row]))
        texts = [shortened(tokenizer.decode(self.tokens.row(number)), 80) for number in numbers[:3].tolist()]
        told = "" if self.scores is None else f"[{self.scores[row]:g}] "
        return f"{told}{' | '.join(texts)}{f' | {len(numbers) - 3} more' if len(numbers) > 3 else ''}"


def text_ids(texts: Sequence[str]) -> np.ndarray:
    """int64, a number below 2^48 for each text, equal for equal texts."""
    digests = b"".join(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).digest() for text in texts)
    numbers = np.zeros((len(texts), 8), np.uint8)
    numbers[:, :6] = np.frombuffer(digests, np.uint8).reshape(-1, 6)
    return numbers.view("<i8").ravel().astype(np.int64)
