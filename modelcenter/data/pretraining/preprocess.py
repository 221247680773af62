"""Tokenises texts into a folder for pretraining, in order, with several processes."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from modelcenter.data.cache import tokenizer_state
from modelcenter.data.parallel import in_processes, ordered_map
from modelcenter.data.readers.parsed import columns_of
from modelcenter.data.schemas.columns import find_columns
from modelcenter.data.streams import RowSource, Texts
from modelcenter.data.table import Origin, Table
from modelcenter.data.token_files import TokenFile, TokenWriter, open_tokens
from modelcenter.data.tokenization.documents import DocumentEncoder, end_token

_LOOKED_AT = 1000  # first rows, from which the column of texts is detected
_CHARACTERS = 1 << 20  # of text per work item,
_DOCUMENTS = 4096  # unless it has this many documents


def preprocess(
    source: RowSource,
    tokenizer: Any,
    path: str | os.PathLike[str],
    *,
    text_column: str | None = None,
    eos: bool = True,
    workers: int = 0,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenFile:
    """Tokenise the texts of a source, one document per row, into a folder (see `token_files`) and open it.

    Documents get no special tokens but `eos` at their end. Rows without text are skipped and counted. The result does
    not depend on `workers`.

    source: see `streams`. tokenizer: a transformers tokenizer. text_column: None: detected as for fine-tuning.
    eos: end each document with the tokenizer's eos_token (BERT-like tokenizers: sep_token).
    workers: processes that tokenise; 0: this one. limit: stop after this many documents.
    progress: called with (documents, tokens) after each work item.

    Raises:
        ValueError: the folder exists, the column does not, a row holds something other than text, there are no
            documents, or the tokenizer has no token for `eos`.
    """
    end = end_token(tokenizer) if eos else None
    vocab_size = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1)
    state = tokenizer_state(tokenizer)
    about = {
        "tokenizer": {
            "name": tokenizer.name_or_path,
            "vocab_size": vocab_size,
            "sha256": hashlib.sha256(state.encode()).hexdigest(),
        },
        "source": {"name": source.name, "fingerprint": source.fingerprint()},
    }
    documents = _Documents(source, text_column)
    encode = DocumentEncoder.of(tokenizer, end)
    writer = TokenWriter(path, vocab_size, end, about)
    processes = in_processes(encode, workers) if workers else nullcontext(encode)
    threads = ThreadPoolExecutor(workers) if workers else nullcontext()
    with writer, processes as function, threads as executor:
        for ids, lengths in ordered_map(function, _pieces(documents, limit), executor, 2 * workers):
            writer.add(ids, lengths)
            if progress is not None:
                progress(writer.documents, writer.tokens)
        if not writer.documents:
            raise ValueError(f"{source.name}: got no rows with text; check the data and --text_column")
        writer.note(skipped=documents.skipped)
    return open_tokens(path)


class _Documents:
    """The texts of a source. skipped: the number of rows without text so far."""

    def __init__(self, source: RowSource, column: str | None):
        self.source, self.column, self.skipped = source, column, 0

    def __iter__(self) -> Iterator[str]:
        column = self._find_column()
        if column is None:
            return
        for row, _ in Texts(self.source, column).read():
            if row is None:
                self.skipped += 1
            else:
                yield row[column]

    def _find_column(self) -> str | None:
        """The column of texts, detected from the first rows; None: there are no rows."""
        head = list(itertools.islice((row for row, _ in self.source.read() if row is not None), _LOOKED_AT))
        if not head:
            return None
        columns = columns_of(head)
        column = self.column
        if column is None and len(columns) == 1 and all(isinstance(x, str) for x in next(iter(columns.values()))):
            column = next(iter(columns))
        table = Table(columns, [Origin(self.source.name, len(head), "")])
        return find_columns(table, text=column, labelled=False).text


def _pieces(texts: Iterable[str], limit: int | None) -> Iterator[list[str]]:
    """The texts in lists, each a work item for a worker."""
    piece: list[str] = []
    size = 0
    for text in itertools.islice(texts, limit):
        piece.append(text)
        size += len(text)
        if size >= _CHARACTERS or len(piece) >= _DOCUMENTS:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
