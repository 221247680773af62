"""The interface between data and the training loop."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

SEQUENCES_PER_ROW = 64  # how many sequences of a row have row_ids of their own


class Examples(Protocol):
    """The rows of one split, ready for batches."""

    @property
    def name(self) -> str:
        """Of the data, for people."""
        ...

    @property
    def truncated(self) -> int:
        """Rows that were cut to fit."""
        ...

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 (n,); of an encoder-decoder, of both sides."""
        ...

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        """The packed batch of these rows, on the host: keyword arguments of the model's forward. What is random in it,
        such as masks, is a function of (seed, epoch, row); training on a mixture gives the step as the epoch."""
        ...

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of the sequences of `batch`, int64, in its order. Dropout draws its masks from them, so that they do
        not depend on how rows are cut into batches. Where each row is one sequence, they are the rows themselves."""
        ...

    def where(self, row: int) -> str:
        """Where a row comes from, such as "train.jsonl, line 3"."""
        ...

    def fingerprint(self) -> Any:
        """JSON-able; changes when the data does."""
        ...

    def show(self, row: int, tokenizer: Any) -> str:
        """A row as the model sees it, for people: its text and what the model is to predict."""
        ...
