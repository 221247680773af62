"""Packing rows by best fit into parts of at most a given number of tokens."""

from __future__ import annotations

import numpy as np


def pack_rows(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack rows into parts of at most `size` tokens, each row into the fullest part with room for it.

    Long rows come first, longest first, because later there would be no room for them; the others follow in the given
    order, so that parts mix lengths if that order is random.

    lengths: int (n,), all at most `size`. Returns (order, ends): part p holds the rows order[ends[p-1]:ends[p]].
    """
    long = np.flatnonzero(lengths * _LONG > size)
    long = long[np.argsort(-lengths[long], kind="stable")]
    first = np.concatenate((long, np.flatnonzero(lengths * _LONG <= size)))
    fit = BestFit(size)
    part_of = np.array(fit.place(lengths[first].tolist()), dtype=np.int64)
    place = np.argsort(part_of, kind="stable")
    return first[place], np.cumsum(np.bincount(part_of, minlength=fit.parts))


_LONG = 8  # a row is long if it takes more than this fraction of a part, 1 / 8


class BestFit:
    """Packs rows one by one into parts of `size` tokens, each into the fullest with room for it; at most `most` parts.

    Open parts are indexed by the room left in them; bit r of `rooms` says that a part with room r is open, so the least
    sufficient room is the lowest set bit from a length on: constant time for a given size.
    """

    def __init__(self, size: int, most: int | None = None):
        self.size, self.most, self.parts = size, most, 0
        self._open: dict[int, list[int]] = {}  # room -> parts
        self._rooms = 0

    def place(self, lengths: list[int]) -> list[int]:
        """The part of each row of at most `size` tokens, in the given order; -1 if none has room."""
        open_parts, rooms, parts, placed = self._open, self._rooms, self.parts, []
        for length in lengths:
            above = rooms >> length
            if above:
                room = length + (above & -above).bit_length() - 1
                stack = open_parts[room]
                part = stack.pop()
                if not stack:
                    rooms ^= 1 << room
            elif parts == self.most:
                placed.append(-1)
                continue
            else:
                part, room = parts, self.size
                parts += 1
            placed.append(part)
            left = room - length
            if left:
                if rooms >> left & 1 == 0:
                    rooms |= 1 << left
                    open_parts.setdefault(left, [])
                open_parts[left].append(part)
        self._rooms, self.parts = rooms, parts
        return placed

    @property
    def room(self) -> bool:
        """Whether some row could still be placed."""
        return self._rooms != 0 or self.parts != self.most


def cut(lengths: np.ndarray, size: int) -> np.ndarray:
    """Split rows, in order, into the fewest runs of at most `size` tokens; returns the end of each run.

    Rows in the order of `pack_rows` are split into no more runs than parts there.

    Raises:
        ValueError: a row is longer than `size`.
    """
    if len(lengths) and int(lengths.max()) > size:
        raise ValueError(
            f"batch_tokens: a row has {int(lengths.max())} tokens, but a microbatch has at most {size}; use fewer "
            "ranks or microbatches for this global batch, or lower max_length"
        )
    total = np.cumsum(lengths)
    ends, done = [], 0
    while done < len(lengths):
        before = int(total[done - 1]) if done else 0
        done = int(np.searchsorted(total, before + size, side="right"))
        ends.append(done)
    return np.array(ends, dtype=np.int64)
