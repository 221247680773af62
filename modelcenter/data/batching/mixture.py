"""Mixtures of data sets, each with its share of the rows of an epoch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelcenter.data.batching.collate import merge
from modelcenter.data.examples import SEQUENCES_PER_ROW, Examples
from modelcenter.data.table import Share, Table, concatenate


class Draw:
    """Draws the rows of an epoch, int64 (rows,), from parts that each have a share of them; part after part.

    See Mixture. part_rows: the rows of each part. names: of the parts, for messages.
    """

    def __init__(
        self,
        part_rows: Sequence[np.ndarray],
        weights: Sequence[float],
        seed: int,
        rows: int | None = None,
        names: Sequence[str] = (),
    ):
        names = names or [f"part {i + 1}" for i in range(len(part_rows))]
        for name, part, weight in zip(names, part_rows, weights, strict=True):
            if not (np.isfinite(weight) and weight > 0):
                raise ValueError(f"mixture: the weight of {name} is {float(weight)}, expected a positive number")
            if not len(part):
                raise ValueError(f"mixture: {name} has no rows")
        self.part_rows, self.seed = part_rows, seed
        self.shares = (np.array(weights, np.float64) / np.sum(weights, dtype=np.float64)).tolist()
        self.rows = sum(map(len, part_rows)) if rows is None else rows
        self.counts = _round_to_sum(np.array(self.shares) * self.rows, self.rows)
        if min(self.counts) < 1:
            i = self.counts.index(min(self.counts))
            raise ValueError(
                f"mixture: {names[i]} with {100 * self.shares[i]:.2g} % of {self.rows} rows gets no row in an epoch; "
                "give it more weight, or leave it out"
            )

    def __call__(self, epoch: int) -> np.ndarray:
        return np.concatenate([self._part(i, epoch) for i in range(len(self.part_rows))])

    def _part(self, i: int, epoch: int) -> np.ndarray:
        size, count = len(self.part_rows[i]), self.counts[i]
        first, end = epoch * count, (epoch + 1) * count
        orders = []
        for turn in range(first // size, -(-end // size)):  # each turn goes through the whole part once
            order = np.random.default_rng([self.seed, 0x313, i, turn]).permutation(size)
            orders.append(order[max(first - turn * size, 0) : min(end - turn * size, size)])
        return self.part_rows[i][np.concatenate(orders)]


class Mixture:
    """Rows of several data sets, each with its share of every epoch; itself such a data set.

    Its rows are the concatenated rows of the parts, and `draw` returns those of an epoch: pass it to `EpochBatches` or
    `TokenBatches` as `draw`.

    An epoch has `rows` rows, by default as many as the parts have together. Each part has its share of them, rounded to
    whole rows. It goes through its own rows in random order, all of them before any is repeated, continuing where the
    last epoch ended: a part whose share is twice its size is used twice per epoch, one with half its size every two
    epochs. The rows of an epoch depend only on (sizes, weights, rows, seed, epoch).

    parts: (examples, weight) pairs; only the ratio of weights counts. See `weights_by_size`.

    Raises:
        ValueError: there are no parts, one is empty, a weight is not positive, or a part's share has no rows.
    """

    def __init__(self, parts: Sequence[tuple[Examples, float]], seed: int, rows: int | None = None):
        if not parts:
            raise ValueError("mixture: there is nothing to mix")
        self.parts, self.seed = [part for part, _ in parts], seed
        sizes = [len(part) for part in self.parts]
        self._starts = np.concatenate(([0], np.cumsum(sizes)))
        part_rows = [np.arange(a, b) for a, b in itertools.pairwise(self._starts.tolist())]
        self._draw = Draw(part_rows, [weight for _, weight in parts], seed, rows, [part.name for part in self.parts])
        self.rows, self.shares, self.counts = self._draw.rows, self._draw.shares, self._draw.counts

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def lengths(self) -> np.ndarray:
        return np.concatenate([part.lengths for part in self.parts])

    def draw(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, int64 (rows,), part after part; a row may come several times."""
        return self._draw(epoch)

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        """The packed batch of these rows: those of one part after those of another."""
        rows = np.asarray(rows)
        part = np.searchsorted(self._starts, rows, side="right") - 1
        present = np.unique(part).tolist() or [0]
        return merge([self.parts[i].batch(rows[part == i] - self._starts[i], epoch) for i in present])

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of the sequences of `batch`, in its order: see Examples."""
        rows = np.asarray(rows)
        part = np.searchsorted(self._starts, rows, side="right") - 1
        numbers = []
        for i in np.unique(part).tolist():
            first = int(self._starts[i])
            numbers.append((self.parts[i].row_ids(rows[part == i] - first) + SEQUENCES_PER_ROW * first) % 2**31)
        return np.concatenate(numbers).astype(np.int64)

    @property
    def name(self) -> str:
        return ", ".join(part.name for part in self.parts)

    @property
    def truncated(self) -> int:
        return sum(part.truncated for part in self.parts)

    def where(self, row: int) -> str:
        part, row = self._place(row)
        return part.where(row)

    def show(self, row: int, tokenizer: Any) -> str:
        part, row = self._place(row)
        return part.show(row, tokenizer)

    def _place(self, row: int) -> tuple[Examples, int]:
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.parts[part], int(row - self._starts[part])

    def fingerprint(self) -> Any:
        return {"rows": self.rows, "shares": self.shares, "parts": [part.fingerprint() for part in self.parts]}


def mixed(tables: Sequence[Table], weights: Sequence[float]) -> Table:
    """One table with the rows of several; `draw_of` draws its epochs by the weights.

    Raises:
        ValueError: two tables without a common column.
    """
    first, *others = tables
    for other in others:
        if not set(first.columns) & set(other.columns):
            had = [f"{table.name} has {', '.join(map(repr, table.columns))}" for table in (first, other)]
            raise ValueError(f"train_data: {' and '.join(had)}; give the columns the same names to mix their rows")
    table = concatenate(list(tables))
    shares = [Share(part.name, part.origin_rows, weight) for part, weight in zip(tables, weights, strict=True)]
    return Table(table.columns, table.origins, table.classes, table.index, shares)


def draw_of(examples: Any, seed: int) -> Callable[[int], np.ndarray] | None:
    """epoch -> its rows, if the examples are a mixture or come from a table of `mixed`; None: every row once.

    Raises:
        ValueError: a part without any row left.
    """
    table = getattr(examples, "table", None)
    if table is None or not table.shares:
        return getattr(examples, "draw", None)
    return _draw(table, seed)


def epoch_frequencies(table: Table) -> np.ndarray | None:
    """How often an epoch draws each row of a table of `mixed`, on average: fp64 (rows,); None: every row once."""
    if not table.shares:
        return None
    draw = _draw(table, seed=0)
    frequencies = np.empty(draw.rows)
    for rows, share in zip(draw.part_rows, draw.shares, strict=True):
        frequencies[rows] = share * draw.rows / len(rows)
    return frequencies


def _draw(table: Table, seed: int) -> Draw:
    """Of a table of `mixed`."""
    part = table.part_of_rows()
    part_rows = [np.flatnonzero(part == i) for i in range(len(table.shares))]
    return Draw(part_rows, [p.weight for p in table.shares], seed, names=[p.name for p in table.shares])


def weights_by_size(sizes: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Weights size ** (1 / temperature): at 1 by size, above it more even, as multilingual models are trained.

    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"mixture temperature: got {temperature}, expected a positive number")
    return [size ** (1 / temperature) for size in sizes]


def parse_weight(spec: str) -> tuple[str, float | None]:
    """ "path@weight" as (path, weight); (spec, None) if no number follows an @, or it is the name of a file.

    Raises:
        ValueError: a weight that is not positive.
    """
    path, at, number = spec.rpartition("@")
    try:
        weight = float(number)
    except ValueError:
        return spec, None
    if not at or not path or Path(spec).exists():
        return spec, None
    if not (np.isfinite(weight) and weight > 0):
        raise ValueError(f"{spec}: the weight after @ is {number}, expected a positive number")
    return path, weight


def parse_weights(specs: Sequence[str]) -> list[tuple[str, float]] | None:
    """The (path, weight) pairs of a data argument; None if there are no weights.

    Raises:
        ValueError: only some entries have a weight; a weight without an entry.
    """
    parsed = [parse_weight(spec) for spec in specs]
    for path, _ in parsed:
        if re.fullmatch(r"\d*\.?\d+", path) and not Path(path).exists():
            raise ValueError(f"train_data: got {path!r}; a weight is written after its entry, as in PATH@{path}")
    bare = [path for path, weight in parsed if weight is None]
    if bare and len(bare) < len(parsed):
        raise ValueError(f"train_data: {bare[0]} has no weight, but others have; write {bare[0]}@1, or leave all out")
    return None if bare else [(path, weight) for path, weight in parsed if weight is not None]


def _round_to_sum(shares: np.ndarray, total: int) -> list[int]:
    """Whole numbers that sum to `total`, each next to its share: the greatest remainders are rounded up."""
    counts = np.floor(shares).astype(np.int64)
    rest = np.argsort(-(shares - counts), kind="stable")[: total - int(counts.sum())]
    counts[rest] += 1
    return counts.tolist()
