"""Examples of texts to be ranked: each text is a sequence, together with its query."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelcenter.data.batching.collate import pack
from modelcenter.data.schemas.ranked_texts import RankedTexts, starts
from modelcenter.training.tasks.examples import TokenExamples
from modelcenter.training.tasks.preview import shortened


@dataclass(frozen=True)
class RankedExamples(TokenExamples):
    """Rows of texts. `tokens` has a sequence for each text, row by row.

    texts: their source. in_turn: an epoch uses one of a row's positives and max_negatives of its negatives, different
    ones in each epoch; False: all, as in evaluations. max_negatives: None: all.
    """

    texts: RankedTexts
    in_turn: bool = False
    max_negatives: int | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def _positives(self) -> np.ndarray:
        """How many texts at the start of each row are positives used in turn, int64 (rows,); 0: all texts are used."""
        positives = self.texts.positives
        return np.zeros(len(self), np.int64) if positives is None or not self.in_turn else positives

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each row in an epoch that uses its longest texts."""
        lengths, row_of, positives = self.tokens.lengths, self.texts.row_of, self._positives
        is_positive = _places(self.texts.texts.counts)[1] < positives[row_of]
        longest = np.zeros(len(self), np.int64)
        np.maximum.at(longest, row_of[is_positive], lengths[is_positive])
        others, of_others = lengths[~is_positive], row_of[~is_positive]
        order = np.lexsort((-others, of_others))  # row by row, the longest first
        first = starts(self.texts.texts.counts - positives)[:-1]
        place = np.arange(len(others)) - first[of_others]
        taken = others[order] * (place < self._taken(np.arange(len(self)))[of_others])
        return longest + np.bincount(of_others, taken, len(self)).astype(np.int64)

    def _taken(self, rows: np.ndarray) -> np.ndarray:
        """How many of the other texts of these rows a batch uses."""
        others = self.texts.texts.counts[rows] - self._positives[rows]
        return others if self.max_negatives is None or not self.in_turn else np.minimum(others, self.max_negatives)

    def numbers(self, rows: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the texts that an epoch uses of these rows, row by row; how many of each row), int64."""
        rows = np.asarray(rows, np.int64)
        first, positives, taken = self.texts.texts.first[rows], self._positives[rows], self._taken(rows)
        counts = taken + (positives > 0)
        row_of, place = _places(counts)
        others = np.maximum(self.texts.texts.counts[rows] - positives, 1)
        place = place - (positives > 0)[row_of]  # -1: the positive
        turn = (epoch * taken[row_of] + place) % others[row_of]
        numbers = first[row_of] + np.where(
            place < 0, epoch % np.maximum(positives, 1)[row_of], positives[row_of] + turn
        )
        return numbers, counts

    def facts(self, rows: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, dict[str, Tensor]]:
        """(numbers of the texts of these rows in an epoch, their entries in a batch: ranking_losses.TEXT_FACTS)."""
        numbers, counts = self.numbers(rows, epoch)
        return numbers, {
            "labels": torch.from_numpy(self.texts.labels[numbers]),
            "row_texts": torch.from_numpy(counts),
        }

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        numbers, facts = self.facts(rows, epoch)
        return {**pack(self.tokens, numbers), **facts}

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        return self.numbers(rows)[0]

    def show(self, row: int, tokenizer: Any) -> str:
        numbers, facts = self.facts(np.array([row]))
        shown = [
            f"[{label:g}] {shortened(tokenizer.decode(self.tokens.row(number)), 80)}"
            for number, label in zip(numbers[:3].tolist(), facts["labels"].tolist(), strict=False)
        ]
        return f"{' | '.join(shown)}{f' | {len(numbers) - 3} more' if len(numbers) > 3 else ''}"


def _places(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For concatenated lists with these lengths: (the list of each item, its index there)."""
    list_of = np.repeat(np.arange(len(counts)), counts)
    return list_of, np.arange(len(list_of)) - starts(counts)[:-1][list_of]
