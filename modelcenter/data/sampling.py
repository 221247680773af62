"""The rows of each batch, as pure functions of the arguments, so that any rank can compute any step of any epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from modelcenter.data.batching.packing import cut, pack_rows


class CutRows(Sequence[np.ndarray]):
    """The global batches of an epoch, each sliced from its rows on access: an epoch may have tens of millions of steps,
    and as many arrays would take gigabytes.

    rows: int64 (n,), batch after batch. ends: int (batches,), the end of each. prepare: applied to the rows of a batch.
    """

    def __init__(self, rows: np.ndarray, ends: np.ndarray, prepare: Callable[[np.ndarray], np.ndarray] | None = None):
        self._rows, self._ends, self._prepare = rows, ends, prepare

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, number: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, number: slice) -> list[np.ndarray]: ...

    def __getitem__(self, number: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        number = range(len(self))[number]
        rows = self._rows[self._ends[number - 1] if number else 0 : self._ends[number]]
        return rows if self._prepare is None else self._prepare(rows)


@dataclass(frozen=True)
class EpochBatches:
    """The global batches of an epoch: every row exactly once, in random order; the last batch may be smaller.

    Rows of similar length are not grouped: packed rows have no padding to save, and batches of similar rows give worse
    estimates of the gradient. Depends only on (lengths, global_batch_size, seed, epoch), not on ranks or accumulation.
    """

    lengths: np.ndarray  # int (n,): tokens of each row
    global_batch_size: int
    seed: int
    draw: Callable[[int], np.ndarray] | None = None  # epoch -> its rows, the same number in each; None: all rows

    @functools.cached_property  # needed at each step, and a mixture draws all its rows to count them
    def steps(self) -> int:
        """The number of global batches in an epoch."""
        rows = len(self.lengths) if self.draw is None else len(self.draw(0))
        return -(-rows // self.global_batch_size)

    def epoch(self, epoch: int) -> CutRows:
        """Rows of each global batch, longest first: `steps` int64 arrays of global_batch_size (the last may be
        shorter)."""
        order = np.random.default_rng([self.seed, epoch]).permutation(epoch_rows(self.draw, epoch, self.lengths))
        ends = np.minimum(np.arange(1, self.steps + 1) * self.global_batch_size, len(order))
        return CutRows(order, ends, functools.partial(_longest_first, lengths=self.lengths))

    def deal(self, rows: np.ndarray, ranks: int, microbatches: int) -> list[list[np.ndarray]]:
        """A global batch as [rank][microbatch] -> rows: see `deal`."""
        return deal(rows, ranks, microbatches)


class TokenBatches:
    """The global batches of an epoch by tokens: each holds at most `budget` tokens, in parts of at most `part`.

    Rows are packed into parts by best fit, so that parts are full whatever the lengths; a global batch is
    budget // part consecutive parts. Which lengths share a part is computed once; the rows with these lengths, and the
    parts that share a batch, are redrawn in each epoch. So all epochs have the same number of steps, and contain every
    row once.

    Depends only on (lengths, budget, seed, part, epoch), not on ranks or accumulation: a run that continues on another
    number of ranks, with the same budget and part, has the same batches.

    lengths: int (n,), tokens of each row.
    budget: tokens of a global batch: those of a microbatch times ranks times accumulation.
    part: tokens of a microbatch; None: the budget (one rank, one microbatch).
    draw: epoch -> its rows, with repeats (a mixture's `draw`). Lengths then differ between epochs, so each is packed
        separately. To keep the number of steps of epoch 0, a longer epoch drops its emptiest parts, and a shorter one
        repeats some: a small fraction of rows, which a mixture draws at random anyway.

    Raises:
        ValueError: there are no rows, a row has more tokens than a part, or the budget is less than a part.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        budget: int,
        seed: int,
        part: int | None = None,
        draw: Callable[[int], np.ndarray] | None = None,
    ):
        self.lengths, self.budget, self.seed, self.draw = np.asarray(lengths, np.int64), budget, seed, draw
        self.part = budget if part is None else part
        if not len(self.lengths):
            raise ValueError("batches by tokens: there are no rows")
        if not 0 < self.part <= budget:
            raise ValueError(
                f"batch_tokens: a microbatch of {self.part} tokens and a global batch of {budget}; expected at least 1 "
                "token, and a global batch no smaller than a microbatch"
            )
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > self.part:
            raise ValueError(
                f"batch_tokens: row {longest + 1} of {len(self.lengths)} has {self.lengths[longest]} tokens, but a "
                f"microbatch has at most {self.part}; raise batch_tokens to {self.lengths[longest]}, or lower "
                "max_length"
            )
        rows = epoch_rows(draw, 0, self.lengths)
        self._slots, self._ends = self._pack(rows, 0)
        # Rows by length, and slots of the parts by the length that they hold, which are paired differently in each
        # epoch.
        self._places = np.argsort(self.lengths[self._slots], kind="stable")
        self.steps = -(-len(self._ends) // self.parts)

    @property
    def parts(self) -> int:
        """The number of parts in a full global batch."""
        return self.budget // self.part

    def epoch(self, epoch: int) -> CutRows:
        """Rows of each global batch, part after part: `steps` int64 arrays."""
        random = np.random.default_rng([self.seed, epoch])
        rows, ends = self._slots, self._ends
        if self.draw is None:
            shuffled = random.permutation(len(self.lengths))
            rows = np.empty_like(rows)
            rows[self._places] = shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        elif epoch:
            rows, ends = self._pack(self.draw(epoch), epoch)
        starts = np.concatenate(([0], ends[:-1]))
        emptiest = np.argsort(-np.add.reduceat(self.lengths[rows], starts), kind="stable")
        order = random.permutation(emptiest[:-1])
        order = np.append(order, emptiest[-1])  # last, in the batch of the remainder
        least, most = (self.steps - 1) * self.parts + 1, self.steps * self.parts
        if len(order) > most:  # this and the following cases only occur with mixtures
            order = order[np.isin(order, emptiest[:most])]
        while len(order) < least:
            order = np.concatenate((order, order[: least - len(order)]))
        # Gather the parts in their new order: row i of part p comes from starts[p] + i.
        sizes = (ends - starts)[order]
        bounds = np.cumsum(sizes)
        gather = np.arange(bounds[-1]) + np.repeat(starts[order] - (bounds - sizes), sizes)
        return CutRows(rows[gather], np.append(bounds[self.parts - 1 : -1 : self.parts], bounds[-1]))

    def deal(self, rows: np.ndarray, ranks: int, microbatches: int) -> list[list[np.ndarray]]:
        """A global batch as [rank][microbatch] -> rows, each with at most budget / (ranks x microbatches) tokens.

        With the ranks and microbatches for which `part` was chosen, these are the packed parts. With others, a new
        microbatch starts whenever one is full; if more microbatches than requested are needed, there are more rather
        than larger ones.

        Raises:
            ValueError: a row is longer than such a microbatch.
        """
        return deal_parts(cut(self.lengths[rows], self.budget // (ranks * microbatches)), rows, ranks, microbatches)

    def _pack(self, rows: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        shuffled = np.random.default_rng([self.seed, epoch, 0xB175]).permutation(rows)
        order, ends = pack_rows(self.lengths[shuffled], self.part)
        return shuffled[order], ends


def epoch_rows(draw: Callable[[int], np.ndarray] | None, epoch: int, lengths: np.ndarray) -> np.ndarray:
    """The rows of an epoch: those drawn, or all."""
    return np.arange(len(lengths)) if draw is None else draw(epoch)


def deal_parts(ends: np.ndarray, rows: np.ndarray, ranks: int, microbatches: int) -> list[list[np.ndarray]]:
    """The parts of a batch, rows[0:ends[0]], rows[ends[0]:ends[1]] ..., as [rank][microbatch]; with empty ones if there
    are too few, and more microbatches if there are too many."""
    parts = np.split(rows, ends[:-1]) if len(ends) else []
    microbatches = max(microbatches, -(-len(parts) // ranks))
    parts += [rows[:0]] * (ranks * microbatches - len(parts))
    return [parts[rank::ranks] for rank in range(ranks)]


def deal(rows: np.ndarray, ranks: int, microbatches: int) -> list[list[np.ndarray]]:
    """Split a global batch, longest first, into [rank][microbatch] arrays of nearly equal tokens, each longest first.

    Rows are dealt back and forth (0 1 2 2 1 0 0 1 ...), so that no rank waits for others and no microbatch runs out of
    memory before others. Sizes differ by at most one row; microbatches of a short last batch may be empty.
    """
    piles = ranks * microbatches
    turn = np.arange(len(rows))
    place = turn % (2 * piles)
    pile = np.minimum(place, 2 * piles - 1 - place)
    return [[rows[pile == micro * ranks + rank] for micro in range(microbatches)] for rank in range(ranks)]


def evaluation_batches(lengths: np.ndarray, batch_size: int, ranks: int = 1) -> list[list[np.ndarray]]:
    """[rank] -> batches of rows: every row exactly once over all ranks. Ranks differ by at most one batch.

    The order is fixed: longest first, so that a batch that is too large for memory fails at once, and the rows of a
    batch have similar lengths.
    """
    rows = _longest_first(np.arange(len(lengths)), lengths)
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return [batches[rank::ranks] for rank in range(ranks)]


def _longest_first(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return rows[np.argsort(-lengths[rows], kind="stable")]
