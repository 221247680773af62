"""Global batches of data that are read and tokenised during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import dropwhile, islice
from typing import Any, NamedTuple

import numpy as np

from modelcenter.data.batching.packing import BestFit, cut
from modelcenter.data.parallel import ordered_map
from modelcenter.data.readers.row_streams import START, Cursor, Row
from modelcenter.data.sampling import deal, deal_parts
from modelcenter.data.streams import RowSource

_CHUNK = 256  # rows per call of the tokenizer
_MAX_HELD = 64  # maximum rows that wait for a part with room for them


class Window(NamedTuple):
    """Rows that are shuffled together: window `number` of an epoch, which starts at a cursor of the source."""

    epoch: int
    number: int
    cursor: Cursor


class _Item(NamedTuple):
    window: Window
    place: int  # in the window's shuffled order
    cursor: Cursor  # of the row in the source
    row: Any  # tokenised; None: dropped
    length: int
    piece: int = 0  # its number among the pieces of the source's row
    last: bool = True  # whether it is the last of them


@dataclass(frozen=True)
class StreamBatch:
    """One global batch.

    rows: tokenised rows; places: the location of each in the data, for messages; epoch: of the rows.
    keys: identify each row in its epoch: its file, its number there, and its piece.
    state: JSON-serialisable; `StreamBatches.at(state)` continues with the batch after this one.
    """

    rows: list[Any]
    lengths: np.ndarray
    places: list[str]
    epoch: int
    state: dict[str, Any]
    budget: int | None
    keys: list[tuple[int, int, int]]

    def rank_batches(self, data_rank: int, ranks: int, microbatches: int) -> list[list[Any]]:
        """The rows of each microbatch of a rank: see `rank_numbers`."""
        return [[self.rows[i] for i in part] for part in self.rank_numbers(data_rank, ranks, microbatches)]

    def rank_numbers(self, data_rank: int, ranks: int, microbatches: int) -> list[np.ndarray]:
        """The indices into `rows` of each microbatch of a rank; every row is in one microbatch of one rank.

        Rows are dealt as `EpochBatches` does, or as `TokenBatches` if the batch is one by tokens.
        """
        if self.budget is None:
            dealt = deal(np.argsort(-self.lengths, kind="stable"), ranks, microbatches)
        else:
            ends = cut(self.lengths, self.budget // (ranks * microbatches))
            dealt = deal_parts(ends, np.arange(len(self.rows)), ranks, microbatches)
        return dealt[data_rank]


class StreamBatches:
    """An endless stream of global batches, epoch after epoch, from a stream of rows.

    The rows of each window of `window` rows are shuffled by (seed, epoch, window), tokenised in that order and put
    into global batches. Every row occurs once per epoch; the last batch of an epoch may be smaller. The batches depend
    only on (source, tokenise, window, seed, batch size), not on ranks, workers, or where a run resumed.

    source: see `streams`. tokenise: from rows to tokenised rows, None to drop one; the result for a row must not depend
    on other rows. Empty rows are not passed to it. several: it returns a list for each row, such as the pieces of a
    long text, which then become consecutive rows.
    global_batch_size: rows of a batch. Or budget: tokens of a batch, in parts of at most `part` (the microbatch; None:
    the budget), filled by best fit: up to 64 rows for which no part has room wait for the next batch.
    length: tokens of a tokenised row; the default counts input_ids and decoder_input_ids.
    workers: threads that tokenise ahead; 0: none.

    Each rank reads and tokenises all rows: dealing by length needs all lengths.

    Raises:
        ValueError: neither or both sizes are given; when reading: a row is longer than a part, the source has no rows,
            and as source and tokenise.
    """

    def __init__(
        self,
        source: RowSource,
        tokenise: Callable[[list[Row]], Sequence[Any]],
        *,
        seed: int,
        global_batch_size: int | None = None,
        budget: int | None = None,
        part: int | None = None,
        window: int = 10_000,
        workers: int = 0,
        length: Callable[[Any], int] | None = None,
        several: bool = False,
    ):
        if (global_batch_size is None) == (budget is None):
            raise ValueError("streaming: give either global_batch_size (rows) or budget (tokens)")
        self.part = budget if part is None else part
        sizes = {"global_batch_size": global_batch_size, "budget": budget, "part": self.part, "window": window}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"streaming: {name} is {value}, expected at least 1")
        if budget is not None and self.part is not None and self.part > budget:
            raise ValueError(f"streaming: a part of {self.part} tokens does not fit the budget of {budget}")
        self.source, self.tokenise, self.seed, self.window = source, tokenise, seed, window
        self.global_batch_size, self.budget, self.workers = global_batch_size, budget, workers
        self.length, self.several = length or _length, several

    def at(self, state: Mapping[str, Any] | None = None) -> Iterator[StreamBatch]:
        """Batches from a state on; None: from the start."""
        window, place, piece, skipped, held = self._restore(state)
        pool: Any = ThreadPoolExecutor(self.workers) if self.workers else nullcontext()
        with pool as executor:
            chunks = self._chunks(window, place)
            tokenised = ordered_map(self._tokenise, chunks, executor, 2 * max(1, self.workers))
            drawn: Iterator[_Item] = (item for items in tokenised for item in items)
            if piece:  # this many pieces of the first row were in earlier batches
                first = place, piece
                drawn = dropwhile(lambda item: (item.place, item.piece) < first, drawn)
            seen = state is not None  # whether the current epoch has yielded any row
            while True:
                batch, held = self._start_batch(held)
                waiting = [*batch.items, *held]
                ended = bool(waiting) and waiting[0].window.epoch < window.epoch  # only held rows of the epoch are left
                while not ended and not batch.full and len(held) < _MAX_HELD:
                    item = next(drawn)
                    ended = item.window.epoch > window.epoch  # an item without a row, which marks the new epoch
                    window = item.window
                    place, piece = (item.place + 1, 0) if item.last else (item.place, item.piece + 1)
                    if ended:
                        break
                    if item.row is None:
                        skipped += 1
                    elif not batch.add(item):
                        held.append(item)
                if batch.items:
                    seen = True
                    yield self._stream_batch(batch, self._state(window, (place, piece), skipped, held))
                elif not seen:
                    raise ValueError(f"{self.source.name}: an epoch has no rows")
                else:
                    seen = False

    def _start_batch(self, held: list[_Item]) -> tuple[_PartialBatch, list[_Item]]:
        batch = _PartialBatch(self.global_batch_size, self.part, self.budget, self.source)
        return batch, [item for item in held if not batch.add(item)]

    def _stream_batch(self, batch: _PartialBatch, state: dict[str, Any]) -> StreamBatch:
        items = batch.in_order()
        lengths = np.array([item.length for item in items], dtype=np.int64)
        places = [self.source.where(item.cursor) for item in items]
        keys = [(item.cursor.file, item.cursor.row, item.piece) for item in items]
        return StreamBatch([i.row for i in items], lengths, places, items[0].window.epoch, state, self.budget, keys)

    def _state(self, window: Window, place: tuple[int, int], skipped: int, held: list[_Item]) -> dict[str, Any]:
        windows = list(dict.fromkeys([*(item.window for item in held), window]))
        return {
            "windows": [[w.epoch, w.number, *w.cursor] for w in windows],
            "place": list(place),
            "held": [[windows.index(item.window), item.place, item.piece] for item in held],
            "skipped": skipped,
        }

    def _restore(self, state: Mapping[str, Any] | None) -> tuple[Window, int, int, int, list[_Item]]:
        if state is None:
            return Window(0, 0, START), 0, 0, 0, []
        windows = [Window(epoch, number, Cursor(*cursor)) for epoch, number, *cursor in state["windows"]]
        held: dict[tuple[int, int, int], _Item] = {}
        for i, window in enumerate(windows):
            places = dict.fromkeys(place for n, place, _ in state["held"] if n == i)
            if places:
                rows = self._shuffled(window, list(islice(self._read(window.cursor), self.window)))
                for place in places:
                    held |= {(i, place, item.piece): item for item in self._tokenise([rows[place]])}
        place, piece = state["place"]
        return windows[-1], place, piece, state["skipped"], [held[tuple(key)] for key in state["held"]]

    def _read(self, cursor: Cursor) -> Iterator[tuple[Cursor, Row | None, Cursor]]:
        for row, after in self.source.read(cursor):
            # A new file starts at its first row; within a file a row starts where the one before it ends.
            yield (cursor if cursor.file == after.file else Cursor(after.file)), row, after
            cursor = after

    def _shuffled(self, window: Window, rows: list[tuple[Cursor, Row | None, Cursor]]) -> list[_Item]:
        order = np.random.default_rng([self.seed, window.epoch, window.number]).permutation(len(rows))
        return [_Item(window, place, rows[i][0], rows[i][1], 0) for place, i in enumerate(order.tolist())]

    def _chunks(self, window: Window, place: int) -> Iterator[list[_Item]]:
        """The untokenised rows from a position in a window on; an item without a row precedes each further epoch."""
        while True:
            reader = self._read(window.cursor)
            while rows := list(islice(reader, self.window)):
                items = self._shuffled(window, rows)
                for start in range(place, len(items), _CHUNK):
                    yield items[start : start + _CHUNK]
                window, place = Window(window.epoch, window.number + 1, rows[-1][2]), 0
            window, place = Window(window.epoch + 1, 0, START), 0
            yield [_Item(window, -1, START, None, 0)]

    def _tokenise(self, items: list[_Item]) -> list[_Item]:
        filled = [item for item in items if item.row is not None]
        tokenised = iter(self.tokenise([item.row for item in filled]) if filled else ())
        result = []
        for item in items:
            row = None if item.row is None else next(tokenised)
            pieces = [row] if not self.several else [None] if not row else row
            for i, piece in enumerate(pieces):
                length = 0 if piece is None else self.length(piece)
                result.append(item._replace(row=piece, length=length, piece=i, last=i == len(pieces) - 1))
        return result


class _PartialBatch:
    """The rows of a batch that is being filled."""

    def __init__(self, count: int | None, part: int | None, budget: int | None, source: RowSource):
        self.count, self.part, self.source = count, part, source
        self.items: list[_Item] = []
        self.parts: list[int] = []
        self.fit = BestFit(part, budget // part) if part is not None and budget is not None else None

    @property
    def full(self) -> bool:
        return len(self.items) == self.count if self.fit is None else not self.fit.room

    def add(self, item: _Item) -> bool:
        """Add a row if there is room for it, and return whether there is."""
        if self.fit is not None:
            if self.part is not None and item.length > self.part:
                raise ValueError(
                    f"{self.source.where(item.cursor)}: the row has {item.length} tokens, but a microbatch has at most "
                    f"{self.part}; raise batch_tokens, or lower max_length"
                )
            (part,) = self.fit.place([item.length])
            if part < 0:
                return False
            self.parts.append(part)
        self.items.append(item)
        return True

    def in_order(self) -> list[_Item]:
        if self.fit is None:
            return self.items
        return [self.items[i] for i in np.argsort(self.parts, kind="stable")]


def _length(row: Mapping[str, Any]) -> int:
    return len(row["input_ids"]) + len(row.get("decoder_input_ids", ()))
