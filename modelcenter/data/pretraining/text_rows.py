"""Pretraining examples: pieces of documents from texts, token files or streams, under an objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modelcenter.data.blocks import Blocks
from modelcenter.data.cache import cached, digest, tokenizer_state
from modelcenter.data.parallel import ordered_map
from modelcenter.data.pretraining.objectives import Batch, Key, NextSentence, Objective, sequence_numbers
from modelcenter.data.readers.row_streams import Row
from modelcenter.data.streaming import StreamBatch
from modelcenter.data.streams import RowSource, Texts
from modelcenter.data.table import Table
from modelcenter.data.token_files import TokenFile
from modelcenter.data.tokenization.documents import DocumentEncoder

_CHUNK = 4096  # documents per call of the tokenizer
_VERSION = 2  # part of the cache's key


class TextRows:
    """Rows made from token blocks.

    rows: int64, the numbers of the blocks that are rows, ascending; None: all. table: the source rows of the documents,
    if the blocks are made from texts.
    """

    truncated = 0  # long documents make several rows

    def __init__(
        self, blocks: Blocks, objective: Objective, table: Table | None = None, rows: np.ndarray | None = None
    ):
        self.blocks, self.table = blocks, table
        self.name = str(blocks.file.path) if table is None else table.name
        self.numbers = np.arange(len(blocks)) if rows is None else rows
        self.objective = objective
        if isinstance(objective, NextSentence):
            self.objective = objective.with_documents(self.tokens_of_another_document)
            self.tokens_of_another_document((int(self.numbers[0]),), 1, np.random.default_rng(0))  # raises if none
        sizes, row = blocks.piece_sizes()
        lengths = np.bincount(row, weights=objective.lengths(sizes), minlength=len(blocks)).astype(np.int64)
        self._lengths = lengths[self.numbers]

    def split(self, fraction: float, seed: int) -> tuple[TextRows, TextRows]:
        """Split into (most rows, a random fraction of them), which have no token in common.

        The choice depends only on the seed and the tokens. If a row is a piece of one document, whole documents are
        drawn, and at most one of them is split; if rows are cut from joined documents, rows are drawn.

        Raises:
            ValueError: one part would be empty.
        """
        count = round(fraction * len(self))
        if not 0 < count < len(self):
            raise ValueError(
                f"eval_fraction: got {fraction}, which is {count} of {len(self)} rows, expected some rows on each side"
            )
        key = [self.blocks.packing, *(str(part) for part in self._content().items())]
        random = np.random.default_rng([seed, 0x5EED, int(digest(key), 16)])
        units = self.blocks.documents_of(self.numbers) if self.blocks.packing == "none" else self.numbers
        distinct, unit = np.unique(units, return_inverse=True)
        drawn = np.argsort(random.permutation(len(distinct))[unit], kind="stable")
        parts = np.sort(drawn[count:]), np.sort(drawn[:count])
        first, second = (TextRows(self.blocks, self.objective, self.table, self.numbers[part]) for part in parts)
        return first, second

    def with_objective(self, objective: Objective) -> TextRows:
        """The same rows under another objective, whose lengths are the same."""
        return TextRows(self.blocks, objective, self.table, self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths

    def batch(self, rows: np.ndarray, epoch: int = 0) -> Batch:
        numbers = self.numbers[np.asarray(rows)].tolist()
        return self.objective.batch([self.blocks.row(n) for n in numbers], [(n,) for n in numbers], epoch)

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of the sequences of `batch`, in its order: see Examples."""
        numbers, shortest = self.numbers[np.asarray(rows)].tolist(), self.objective.min_sequence
        counts = [sum(end - start >= shortest for _, start, end in self.blocks.pieces(n)) for n in numbers]
        return sequence_numbers([(n,) for n in numbers], counts)

    def where(self, row: int) -> str:
        number = int(self.numbers[row])
        document = self.blocks.pieces(number)[0][0]
        return self.blocks.where(number) if self.table is None else self.table.where(document)

    def fingerprint(self) -> Any:
        about = self.blocks.fingerprint() | {"rows": len(self)}
        if len(self) < len(self.blocks):
            about["part"] = digest([self.numbers])
        return about if self.table is None else about | {"sha256": self.table.fingerprint()["sha256"]}

    def _content(self) -> dict[str, Any]:
        """An identifier of the tokens, wherever they are stored."""
        about = self.blocks.file.fingerprint()
        if self.table is None:
            return about
        return about | {"sha256": [origin.sha256 for origin in self.table.origins]}

    def show(self, row: int, tokenizer: Any) -> str:
        return preview(self.batch(np.array([row])), tokenizer)

    def tokens_of_another_document(self, key: Key, count: int, random: np.random.Generator) -> np.ndarray:
        """Up to `count` tokens from a document other than that of row `key`.

        Raises:
            ValueError: all rows are from one document.
        """
        document = self.blocks.pieces(key[0])[0][0]
        first, end = np.searchsorted(self.numbers, self.blocks.rows_of(document)).tolist()
        if end - first == len(self):
            raise ValueError(f"next_sentence: {self.name} is one document, expected at least two; see --document")
        drawn = int(random.integers(0, len(self)))
        if first <= drawn < end:  # same document: take the next row of another one
            drawn = end % len(self)
        (tokens,) = self.blocks.row(int(self.numbers[drawn]))
        start = int(random.integers(0, max(len(tokens) - count, 0) + 1))
        return tokens[start : start + count]


class StreamRow(NamedTuple):
    """A row of a stream."""

    tokens: np.ndarray
    key: Key
    place: str


class StreamRows:
    """Rows of a stream of texts: the pieces of each document in order.

    They have no length and no row numbers: a row is a StreamRow. tell: see streams.Texts.
    """

    truncated = 0

    def __init__(
        self,
        source: RowSource,
        tokenizer: Any,
        objective: Objective,
        column: str,
        end: int | None,
        tell: Callable[[str], None] | None = None,
    ):
        self.source: RowSource = Texts(source, column, tell)
        self.objective, self.column = objective, column
        self.name = source.name
        self.encode = DocumentEncoder.of(tokenizer, None if objective.bare else end)

    def pieces(self, rows: list[Row]) -> list[list[np.ndarray]]:
        """The pieces of the text of each row."""
        texts = [row[self.column] for row in rows]
        ids, lengths = self.encode(texts)
        ends = np.cumsum(lengths)
        shortest, longest = self.objective.min_piece, self.objective.max_piece
        pieces = []
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
            start = end - length
            cuts = [ids[at : min(at + longest, end)] for at in range(start, end, longest)]
            pieces.append([piece for piece in cuts if len(piece) >= shortest])
        return pieces

    def rows_of(self, batch: StreamBatch) -> list[StreamRow]:
        """The rows of a global batch."""
        return [StreamRow(*row) for row in zip(batch.rows, batch.keys, batch.places, strict=True)]

    def length(self, piece: np.ndarray) -> int:
        """The number of tokens of a piece in a batch."""
        return int(self.objective.lengths(np.array([len(piece)]))[0])

    def batch(self, rows: Sequence[StreamRow], epoch: int = 0) -> Batch:
        return self.objective.batch([[row.tokens] for row in rows], [row.key for row in rows], epoch)

    def row_ids(self, rows: Sequence[StreamRow]) -> np.ndarray:
        """Numbers of the sequences of `batch`, in its order."""
        return sequence_numbers([row.key for row in rows], [1] * len(rows))

    def where(self, row: StreamRow) -> str:
        return row.place

    def fingerprint(self) -> Any:
        return {"source": self.source.fingerprint(), "column": self.column}

    def show(self, row: StreamRow, tokenizer: Any) -> str:
        return preview(self.batch([row]), tokenizer)


def encode_texts(tokenizer: Any, texts: Sequence[str], name: str, end: int | None, cache: bool = True) -> TokenFile:
    """The texts as documents of tokens, each ending with `end`; from the cache if it has them. Empty texts are empty
    documents."""

    def build() -> dict[str, np.ndarray]:
        encode = DocumentEncoder.of(tokenizer, end)
        chunks = (list(texts[start : start + _CHUNK]) for start in range(0, len(texts), _CHUNK))
        encoded = list(ordered_map(encode, chunks))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([sizes for _, sizes in encoded]))])
        return {"ids": np.concatenate([ids for ids, _ in encoded]).astype(np.int32), "offsets": offsets}

    key = ["documents", _VERSION, end, tokenizer_state(tokenizer), texts]
    arrays = cached(key, build, cache=cache)
    about = {"format": "text", "dtype": "int32", "documents": len(texts), "tokens": len(arrays["ids"]), "eos": end}
    return TokenFile(Path(name), arrays["ids"], arrays["offsets"], about)


def preview(batch: Batch, tokenizer: Any, width: int = 200) -> str:
    """A batch of one row as text: what the model reads, and what it should predict."""
    read = tokenizer.decode(batch["input_ids"][0].tolist())
    text = _shorten(read, width)
    labels = batch["labels"][0]
    if batch["labels"].shape == batch["input_ids"].shape and bool((labels == batch["input_ids"][0]).all()):
        return f"[next tokens] {text}"
    targets = " ".join(tokenizer.decode([i]).strip() for i in labels[labels >= 0].tolist())
    return f"{text} -> {_shorten(targets, width)}"


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
