"""Rows of tokens of which some, the answers, are trained on."""

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from modelcenter.data.batching.collate import pack
from modelcenter.data.tokenization.answer_labels import IGNORED
from modelcenter.training.tasks.base import TokenExamples


@dataclass(frozen=True)
class AnswerExamples(TokenExamples):
    """Rows of tokens with the labels of those that are trained on. context: batches say which tokens come before the
    first of them."""

    labels: np.ndarray  # int32 (T,)
    context: bool = False

    def labels_of(self, row: int) -> np.ndarray:
        return self.labels[self.tokens.offsets[row] : self.tokens.offsets[row + 1]]

    def prompt_length(self, row: int) -> int:
        """Tokens before the first that is trained on."""
        return int(np.argmax(self.labels_of(row) != IGNORED))

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        batch: dict[str, Any] = pack(self.tokens, rows)
        batch["labels"] = pack(replace(self.tokens, ids=self.labels), rows)["input_ids"]
        if self.context:
            before = [np.arange(self.tokens.lengths[row]) < self.prompt_length(row) for row in rows]
            batch["context"] = torch.from_numpy(np.concatenate(before).astype(np.int64))[None]
        return batch

    def show(self, row: int, tokenizer: Any) -> str:
        return marked_text(self.tokens.row(row), self.labels_of(row) != IGNORED, tokenizer)


def marked_text(ids: np.ndarray, trained: np.ndarray, tokenizer: Any) -> str:
    """The text of some tokens, those that are trained on in green on a terminal, else between marks; the middle of long
    parts is left out."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    start, end = ("\x1b[32m", "\x1b[0m") if colour else ("⟦", "⟧")
    bounds = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(ids)]
    parts = []
    for a, b in zip(bounds, bounds[1:], strict=False):
        text = tokenizer.decode(ids[a:b])
        text = text if len(text) <= 240 else f"{text[:160]} ... {text[-70:]}"
        parts.append(f"{start}{text}{end}" if trained[a] else text)
    return "".join(parts).replace("\n", "\\n")
