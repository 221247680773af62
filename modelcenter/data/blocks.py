"""From documents to the rows on which a language model is trained: pieces of at most `max_length` tokens."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from modelcenter.data.batching.collate import pack_documents
from modelcenter.data.examples import SEQUENCES_PER_ROW
from modelcenter.data.token_files import TokenFile


class Blocks:
    """The rows of a token file, built on demand; only one number per document is held in memory.

    packing "none": a row is a piece of one document, which is split every `max_length` tokens; the rest is a shorter
        row, if it has at least min_length tokens.
    packing "concat": documents are concatenated, each followed by `eos`, and split every `max_length` tokens, so all
        rows except the last are full. A document that starts within a row is a separate sequence there (`cu_seqlens`):
        nothing attends, or is predicted, across its start.

    eos: for "concat", the token after each document; not added if the file has its own. documents: (first, end)
    restricts the rows to some of the documents, e.g. to hold others out. bare: leave out the eos of documents, for
    objectives that add their own special tokens.

    Raises:
        ValueError: no document gives a row, max_length or packing is invalid, or "concat" has no eos.
    """

    def __init__(
        self,
        file: TokenFile,
        max_length: int,
        packing: Literal["none", "concat"] = "none",
        eos: int | None = None,
        documents: tuple[int, int] | None = None,
        min_length: int = 2,
        bare: bool = False,
    ):
        if packing not in ("none", "concat"):
            raise ValueError(f"packing: got {packing!r}, expected none or concat")
        if max_length < 2:
            raise ValueError(f"max_length: got {max_length}, expected at least 2 tokens")
        self.file, self.max_length, self.packing, self.min_length = file, max_length, packing, min_length
        self.first, end = documents or (0, len(file))
        if not 0 <= self.first < end <= len(file):
            raise ValueError(f"documents: got {self.first} to {end}, {file.path} has {len(file)}")
        offsets = file.offsets[self.first : end + 1]
        self.eos = None if file.eos is not None or bare or packing == "none" else eos
        self._left_out = 1 if bare and file.eos is not None else 0  # tokens at the end of each document
        if packing == "concat":
            if eos is None and file.eos is None and not bare:
                raise ValueError(f"packing concat: {file.path} has no eos after its documents; give eos")
            # The starts of documents among the tokens with an eos after each (or without the file's own).
            extra = 0 if self.eos is None else 1
            self._bounds = np.concatenate(([0], np.cumsum(self._sizes(offsets) + extra)))
            self._rows = -(-int(self._bounds[-1]) // max_length)
        else:
            sizes = self._sizes(offsets)
            pieces = sizes // max_length + (sizes % max_length >= max(min_length, 1))
            self._bounds = np.concatenate(([0], np.cumsum(pieces)))
            self._rows = int(self._bounds[-1])
        if not self._rows:
            raise ValueError(f"{file.path}: none of the documents {self.first} to {end} has {min_length} tokens")

    def __len__(self) -> int:
        return self._rows

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 (n,)."""
        lengths = np.full(len(self), self.max_length, np.int64)
        if self.packing == "concat":
            lengths[-1] = int(self._bounds[-1]) - (len(self) - 1) * self.max_length
            return lengths
        sizes = self._sizes(self.file.offsets[self.first : self.first + len(self._bounds)])
        rest = sizes % self.max_length
        kept = np.flatnonzero(rest >= max(self.min_length, 1))
        lengths[self._bounds[kept + 1] - 1] = rest[kept]
        return lengths

    def _sizes(self, offsets: np.ndarray) -> np.ndarray:
        """The tokens of each document that go into rows, without an added eos; empty documents have no eos to drop."""
        sizes = np.diff(offsets)
        return sizes - np.minimum(sizes, self._left_out)

    def piece_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, row) of each piece of all rows, in order; both int64."""
        if self.packing == "none":
            return self.lengths, np.arange(len(self))
        cuts = np.union1d(self._bounds, np.arange(0, int(self._bounds[-1]), self.max_length))
        return np.diff(cuts), cuts[:-1] // self.max_length

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """The row as runs (document, start, end) of tokens in documents; `eos` counts as a document's last token."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        if self.packing == "none":
            document = int(np.searchsorted(self._bounds, row, side="right")) - 1
            start = (row - int(self._bounds[document])) * self.max_length
            offsets = self.file.offsets
            size = int(offsets[self.first + document + 1] - offsets[self.first + document]) - self._left_out
            return [(self.first + document, start, min(start + self.max_length, size))]
        at, end = row * self.max_length, min((row + 1) * self.max_length, int(self._bounds[-1]))
        pieces = []
        document = int(np.searchsorted(self._bounds, at, side="right")) - 1
        while at < end:
            start, stop = int(self._bounds[document]), int(self._bounds[document + 1])
            if stop > at:  # not an empty document
                pieces.append((self.first + document, at - start, min(end, stop) - start))
                at = min(end, stop)
            document += 1
        return pieces

    def documents_of(self, rows: np.ndarray) -> np.ndarray:
        """The document in which each of these rows starts, int64 (n,)."""
        starts = rows if self.packing == "none" else rows * self.max_length
        return self.first + np.searchsorted(self._bounds, starts, side="right") - 1

    def rows_of(self, document: int) -> tuple[int, int]:
        """(first row of a document, row after its last), if each row is a piece of one document."""
        place = document - self.first
        return int(self._bounds[place]), int(self._bounds[place + 1])

    def row(self, row: int) -> list[np.ndarray]:
        """The tokens of a row, piece by piece."""
        return [self._tokens(*piece) for piece in self.pieces(row)]

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        """The packed batch of these rows for a causal language model: see `collate.pack_documents`."""
        return pack_documents([self.row(int(row)) for row in rows])

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of the pieces of these rows: see Examples."""
        counts = [len(self.pieces(int(row))) for row in rows]
        numbers = [int(row) * SEQUENCES_PER_ROW + np.arange(n) for row, n in zip(rows, counts, strict=True)]
        return np.concatenate(numbers) % 2**31

    def where(self, row: int) -> str:
        """The file and document of a row: "corpus:document 12"."""
        return f"{self.file.path}:document {self.pieces(row)[0][0] + 1}"

    def fingerprint(self) -> dict[str, Any]:
        """JSON-serialisable; changes if the tokens or the way of splitting them change."""
        cut = {name: getattr(self, name) for name in ("max_length", "packing", "first", "min_length")}
        about = {**self.file.fingerprint(), **cut, "rows": len(self), "added_eos": self.eos}
        return {**about, "left_out": self._left_out} if self._left_out else about

    def _tokens(self, document: int, start: int, end: int) -> np.ndarray:
        base = int(self.file.offsets[document])
        size = int(self.file.offsets[document + 1]) - base
        tokens = self.file.tokens[base + start : base + min(end, size)].astype(np.int64)
        return tokens if end <= size or self.eos is None else np.append(tokens, self.eos)
