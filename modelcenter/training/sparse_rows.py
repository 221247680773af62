"""Rows of which most elements are 0, such as the sparse embeddings of many texts, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_ELEMENTS = 1 << 24  # elements of rows that are dense at a time


@dataclass(frozen=True)
class SparseRows:
    """(n, width) fp32, in the form of compressed sparse rows.

    Attributes:
        ends: (n + 1,) int64; row i has the entries ends[i] : ends[i + 1]. columns: (k,) int64, ascending in a row.
            values: (k,) fp32.
    """

    ends: Tensor
    columns: Tensor
    values: Tensor
    width: int

    device = torch.device("cpu")

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[np.ndarray, ...]], count: int, width: int) -> "SparseRows":
        """From parts of their entries in any order: (rows, columns, values) each."""
        rows, columns, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        order = np.lexsort((columns, rows))
        ends = np.concatenate(([0], np.bincount(rows, minlength=count).cumsum()))
        return cls(torch.from_numpy(ends), torch.from_numpy(columns[order]), torch.from_numpy(values[order]), width)

    @classmethod
    def of_dense(cls, rows: Tensor) -> "SparseRows":
        at, columns = rows.nonzero().unbind(1)
        ends = F.pad(torch.bincount(at, minlength=len(rows)).cumsum(0), (1, 0))
        return cls(ends, columns, rows[at, columns].float(), rows.shape[1])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, rows: Tensor | slice) -> "SparseRows":
        """The rows with these indices."""
        if isinstance(rows, slice):
            rows = torch.arange(len(self))[rows]
        counts = self.counts[rows]
        ends = F.pad(counts.cumsum(0), (1, 0))
        entries = torch.arange(int(ends[-1])) + (self.ends[rows] - ends[:-1]).repeat_interleave(counts)
        return SparseRows(ends, self.columns[entries], self.values[entries], self.width)

    def to(self, device: torch.device) -> "SparseRows":
        """Itself: the host compares them, whatever the device."""
        return self

    @property
    def counts(self) -> Tensor:
        """(n,) how many entries each row has."""
        return self.ends.diff()

    def row(self, number: int) -> tuple[Tensor, Tensor]:
        """(columns, values) of a row."""
        part = slice(int(self.ends[number]), int(self.ends[number + 1]))
        return self.columns[part], self.values[part]

    def dense(self) -> Tensor:
        """(n, width)."""
        found = torch.zeros(len(self), self.width)
        found[torch.arange(len(self)).repeat_interleave(self.counts), self.columns] = self.values
        return found

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(width,) the sum of the rows times their weights (n,)."""
        factors = weights.to(self.values.dtype).repeat_interleave(self.counts)
        return torch.zeros(self.width).index_add_(0, self.columns, self.values * factors)

    def means_above_zero(self) -> Tensor:
        """(width,) the share of the rows that have an entry in each column."""
        return torch.bincount(self.columns, minlength=self.width) / max(len(self), 1)

    def normalized(self) -> "SparseRows":
        """With rows of length 1; empty ones stay so."""
        at = torch.arange(len(self)).repeat_interleave(self.counts)
        norms = torch.zeros(len(self)).index_add_(0, at, self.values.square()).sqrt()
        return SparseRows(self.ends, self.columns, self.values / norms[at], self.width)

    def products_with(self, others: "SparseRows") -> Tensor:
        """(n, m) the dot products with m other rows."""
        found = torch.empty(len(self), len(others))
        step = max(1, _ELEMENTS // self.width)
        for start in range(0, len(self), step):
            part = slice(start, start + step)
            dense = self[part].dense().T.contiguous()
            # For each of the others, the sum over its entries of their rows of the dense ones.
            found[part] = F.embedding_bag(
                others.columns,
                dense,
                others.ends,
                mode="sum",
                per_sample_weights=others.values,
                include_last_offset=True,
            ).T
        return found


Rows = Tensor | SparseRows


def dot_products(first: Rows, second: Rows) -> Tensor:
    """(n, m) the dot product of each of n rows with each of m, both of one kind."""
    if isinstance(first, SparseRows):
        assert isinstance(second, SparseRows)
        return first.products_with(second)
    assert isinstance(second, Tensor)
    return first @ second.T


def paired_products(first: Rows, second: Rows) -> Tensor:
    """(n,) the dot product of each of n rows with its counterpart."""
    if isinstance(first, Tensor):
        assert isinstance(second, Tensor)
        return (first * second).sum(-1)
    assert isinstance(second, SparseRows)
    step, found = max(1, _ELEMENTS // first.width), [torch.zeros(0)]
    for start in range(0, len(first), step):
        part = slice(start, start + step)
        found.append((first[part].dense() * second[part].dense()).sum(-1))
    return torch.cat(found)


def normalized(rows: Rows) -> Rows:
    """With rows of length 1."""
    return F.normalize(rows, dim=-1) if isinstance(rows, Tensor) else rows.normalized()
