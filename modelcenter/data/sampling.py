"""Which rows go into which batch: pure functions of their arguments, so that any rank can work out any step of any
epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_WINDOW = 50  # global batches sorted together, as transformers' group_by_length


@dataclass(frozen=True)
class EpochBatches:
    """The global batches of an epoch: every row once, none twice, rows of similar length together.

    Rows are shuffled, sorted by length inside windows of many batches, cut into global batches, and the batches
    shuffled. The last batch holds what is left over, from all over the data. Depends on (lengths, global_batch_size,
    seed, epoch) alone, not on ranks or accumulation.
    """

    lengths: np.ndarray  # int (n,): tokens of each row
    global_batch_size: int
    seed: int

    @property
    def steps(self) -> int:
        """Global batches of an epoch."""
        return -(-len(self.lengths) // self.global_batch_size)

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Rows of each global batch, longest first: `steps` int64 arrays of global_batch_size (the last may be
        shorter)."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self.lengths))
        full = len(order) // self.global_batch_size * self.global_batch_size
        window = _WINDOW * self.global_batch_size
        batches = []
        for start in range(0, full, window):
            rows = _longest_first(order[start : min(start + window, full)], self.lengths)
            batches += np.split(rows, len(rows) // self.global_batch_size)
        batches = [batches[i] for i in random.permutation(len(batches))]
        if full < len(order):
            batches.append(_longest_first(order[full:], self.lengths))
        return batches


def deal(rows: np.ndarray, ranks: int, microbatches: int) -> list[list[np.ndarray]]:
    """Cut a global batch, longest first, into [rank][microbatch] arrays of nearly equal tokens, each longest first.

    Rows are dealt back and forth (0 1 2 2 1 0 0 1 ...): no rank waits for another, no microbatch is the one that runs
    out of memory.
    The sizes differ by at most one row; microbatches of a short last batch may be empty.
    """
    piles = ranks * microbatches
    turn = np.arange(len(rows))
    place = turn % (2 * piles)
    pile = np.minimum(place, 2 * piles - 1 - place)
    return [[rows[pile == micro * ranks + rank] for micro in range(microbatches)] for rank in range(ranks)]


def evaluation_batches(lengths: np.ndarray, batch_size: int, ranks: int = 1) -> list[list[np.ndarray]]:
    """[rank] -> batches of rows: every row once over all ranks, none twice. Ranks differ by at most one batch.

    The order is fixed: longest first, so that a batch too large for the memory shows at once and batches hold similar
    lengths.
    """
    rows = _longest_first(np.arange(len(lengths)), lengths)
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return [batches[rank::ranks] for rank in range(ranks)]


def _longest_first(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return rows[np.argsort(-lengths[rows], kind="stable")]
