"""Rows of texts that belong together, as examples."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from modelcenter.data.batching.collate import pack
from modelcenter.training.contrastive import ANCHOR, NEGATIVE, POSITIVE
from modelcenter.training.tasks.base import TokenExamples
from modelcenter.training.tasks.preview import shortened


@dataclass(frozen=True)
class RelatedExamples(TokenExamples):
    """Rows of an anchor, its positives and its negatives. `tokens` has all anchors, then all positives, then all
    negatives.

    first_positive, first_negative: int64 (rows + 1,), the number of the first of each row. text_ids: int64, of each
    text; equal texts have equal ones. scores: fp64 (rows,), or None. max_negatives: of a row in a batch.
    """

    first_positive: np.ndarray
    first_negative: np.ndarray
    text_ids: np.ndarray
    scores: np.ndarray | None = None
    max_negatives: int | None = None

    def __len__(self) -> int:
        return len(self.first_positive) - 1

    @cached_property
    def negatives_taken(self) -> np.ndarray:
        """Negatives of each row in a batch."""
        counts = np.diff(self.first_negative)
        return counts if self.max_negatives is None else np.minimum(counts, self.max_negatives)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, of epochs that take the longest of its texts."""
        lengths, rows = self.tokens.lengths, len(self)
        longest = np.maximum.reduceat(lengths, self.first_positive[:-1])
        taken, first = self.negatives_taken, self.first_negative
        ends = np.concatenate(([0], np.cumsum(lengths)))
        negatives = ends[first[1:]] - ends[first[:-1]]
        for row in np.flatnonzero(taken < np.diff(first)):
            negatives[row] = np.sort(lengths[first[row] : first[row + 1]])[-taken[row] :].sum()
        return lengths[:rows] + longest + negatives

    def numbers(self, rows: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the texts of these rows in an epoch, row by row; their roles)."""
        numbers, roles = [], []
        taken = self.negatives_taken
        for row in np.asarray(rows).tolist():
            positives = range(self.first_positive[row], self.first_positive[row + 1])
            negatives = range(self.first_negative[row], self.first_negative[row + 1])
            chosen = [negatives[(epoch * taken[row] + i) % len(negatives)] for i in range(taken[row])]
            numbers += [row, positives[epoch % len(positives)], *chosen]
            roles += [ANCHOR, POSITIVE, *[NEGATIVE] * len(chosen)]
        return np.array(numbers, np.int64), np.array(roles, np.int64)

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        numbers, roles = self.numbers(rows, epoch)
        batch: dict[str, Any] = pack(self.tokens, numbers)
        batch |= {"roles": torch.from_numpy(roles), "text_ids": torch.from_numpy(self.text_ids[numbers])}
        if self.scores is not None:
            batch["scores"] = torch.from_numpy(np.repeat(self.scores[rows], 2))
        return batch

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        return self.numbers(rows)[0]

    def show(self, row: int, tokenizer: Any) -> str:
        numbers, _ = self.numbers(np.array([row]))
        texts = [shortened(tokenizer.decode(self.tokens.row(number)), 80) for number in numbers[:3].tolist()]
        told = "" if self.scores is None else f"[{self.scores[row]:g}] "
        return f"{told}{' | '.join(texts)}{f' | {len(numbers) - 3} more' if len(numbers) > 3 else ''}"


def text_ids(texts: Sequence[str]) -> np.ndarray:
    """int64, a number below 2^48 for each text; equal texts have equal ones."""
    digests = b"".join(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).digest() for text in texts)
    numbers = np.zeros((len(texts), 8), np.uint8)
    numbers[:, :6] = np.frombuffer(digests, np.uint8).reshape(-1, 6)
    return numbers.view("<i8").ravel().astype(np.int64)
