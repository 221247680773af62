"""The interface between data and the training loop."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

SEQUENCES_PER_ROW = 64  # how many sequences of a row have their own row_ids


class Examples(Protocol):
    """The rows of one split, ready for batches."""

    @property
    def name(self) -> str:
        """The name of the data, for display."""
        ...

    @property
    def truncated(self) -> int:
        """The number of truncated rows."""
        ...

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each row, int64 (n,); for an encoder-decoder, of both sides."""
        ...

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        """The packed batch of these rows, on the host: keyword arguments of the model's forward. Its random parts, such
        as masks, are functions of (seed, epoch, row); training on a mixture passes the step as the epoch."""
        ...

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of the sequences in `batch`, int64, in its order. Dropout masks are derived from them, so that
        they do not depend on how rows are split into batches. If each row is one sequence, they are the row numbers."""
        ...

    def where(self, row: int) -> str:
        """The origin of a row, such as "train.jsonl, line 3"."""
        ...

    def fingerprint(self) -> Any:
        """JSON-serialisable; changes if the data change."""
        ...

    def show(self, row: int, tokenizer: Any) -> str:
        """A row in readable form, as the model reads it: its text and the prediction targets."""
        ...
