"""Examples in which only some tokens, the answers, are trained on."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from modelcenter.data.batching.collate import pack
from modelcenter.data.tokenization.answer_labels import IGNORED
from modelcenter.training.tasks.examples import TokenExamples
from modelcenter.training.tasks.preview import highlighted, on_one_line, without_middle


@dataclass(frozen=True)
class AnswerExamples(TokenExamples):
    """Sequences of tokens with labels for those that are trained on. context: batches mark the tokens before the first
    labelled one as context."""

    labels: np.ndarray  # int32 (T,)
    context: bool = False

    def labels_of(self, row: int) -> np.ndarray:
        return self.labels[self.tokens.offsets[row] : self.tokens.offsets[row + 1]]

    def prompt_length(self, row: int) -> int:
        """The number of tokens before the first that is trained on."""
        return int(np.argmax(self.labels_of(row) != IGNORED))

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        batch: dict[str, Any] = pack(self.tokens, rows)
        batch["labels"] = pack(replace(self.tokens, ids=self.labels), rows)["input_ids"]
        if self.context:
            before = [np.arange(self.tokens.lengths[row]) < self.prompt_length(row) for row in rows]
            batch["context"] = torch.from_numpy(np.concatenate(before).astype(np.int64))[None]
        return batch

    def show(self, row: int, tokenizer: Any) -> str:
        return highlight_trained(self.tokens.row(row), self.labels_of(row) != IGNORED, tokenizer)


def highlight_trained(ids: np.ndarray, trained: np.ndarray, tokenizer: Any) -> str:
    """The text of some tokens, with those that are trained on highlighted and long parts shortened in the middle."""
    bounds = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(ids)]
    parts = []
    for a, b in zip(bounds, bounds[1:], strict=False):
        text = without_middle(tokenizer.decode(ids[a:b]))
        parts.append(highlighted(text) if trained[a] else text)
    return on_one_line("".join(parts))
