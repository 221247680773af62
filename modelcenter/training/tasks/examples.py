"""Examples of one sequence of tokens each, and the batches of an evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import engine
from modelcenter.data.batching.collate import pack
from modelcenter.data.examples import Examples
from modelcenter.data.sampling import evaluation_batches
from modelcenter.data.table import Table
from modelcenter.data.tokenization.tokenize import Tokens
from modelcenter.training.tasks.preview import shortened


@dataclass(frozen=True)
class TokenExamples:
    """Examples of one sequence of tokens each. A subclass adds the labels to `batch` and `show`."""

    table: Table
    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def truncated(self) -> int:
        return self.tokens.truncated

    @property
    def lengths(self) -> np.ndarray:
        return self.tokens.lengths

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        return pack(self.tokens, rows)

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows)

    def where(self, row: int) -> str:
        return self.table.where(row)

    def fingerprint(self) -> Any:
        return self.table.fingerprint()

    def show(self, row: int, tokenizer: Any) -> str:
        return shortened(tokenizer.decode(self.tokens.row(row)))


class Batches:
    """The batches of an evaluation, built whenever they are read, possibly several times.

    Args:
        rows: of each batch. output_logits: argument of the model's forward in each batch; None: omitted.
    """

    def __init__(self, examples: Examples, rows: list[np.ndarray], output_logits: bool | str | None = None):
        self.examples, self.rows = examples, rows
        self.options: dict[str, Any] = {} if output_logits is None else {"output_logits": output_logits}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.examples.batch(self.rows[i]) | self.options


def rank_batches(examples: Examples, batch_size: int) -> list[np.ndarray]:
    """The rows of this rank's batches of an evaluation."""
    return evaluation_batches(examples.lengths, batch_size, engine.data_size())[engine.data_rank()]
