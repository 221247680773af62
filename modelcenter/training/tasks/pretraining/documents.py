"""The documents of pretraining: token files, texts, mixtures of them, and the column of the text."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import engine
from modelcenter.data import sources
from modelcenter.data.batching.mixture import parse_weights
from modelcenter.data.readers.compression import suffix_of
from modelcenter.data.readers.row_streams import Unit
from modelcenter.data.schemas.columns import find_columns
from modelcenter.data.streams import FileRows, RowSource
from modelcenter.data.table import Origin, Table
from modelcenter.data.token_files import TokenFile, is_tokens, open_tokens

log = logging.getLogger("modelcenter")
Split = Callable[[sources.Source], str]  # gives the split of a source to read


@dataclass
class Part:
    """Documents in a token file or in a table of texts."""

    data: TokenFile | Table
    weight: float | None = None

    @property
    def name(self) -> str:
        return str(self.data.path) if isinstance(self.data, TokenFile) else self.data.name


def read_parts(data: Sequence[str], config: str | None, document: Unit, split: Split) -> list[Part]:
    """The parts in a data argument: each token file, and all texts together; if entries have weights, each entry with
    its weight.

    Args:
        split: source -> the split to read.

    Raises:
        ValueError: there is no data; only some entries have weights; the files do not have this document unit.
    """
    weighted = parse_weights(data)
    groups: list[tuple[list[str], float | None]]
    if weighted is not None:
        groups = [([path], weight) for path, weight in weighted]
    else:
        texts = [path for path in data if not is_tokens(path)]
        groups = [([path], None) for path in data if is_tokens(path)]
        if texts:
            groups.append((texts, None))
    parts = []
    for specs, weight in groups:
        if is_tokens(specs[0]):
            parts.append(Part(open_tokens(specs[0]), weight))
        else:
            source = sources.find(specs, config)
            parts.append(Part(read_texts(specs, config, source, split(source), document), weight))
    return parts


def read_texts(specs: list[str], config: str | None, source: sources.Source, split: str, document: Unit) -> Table:
    """A table with one document per row."""
    if document == "line":
        return source.read(split)
    paths = sources.find_paths(specs, config, split)
    wrong = next((path for path in paths or [] if suffix_of(path) != ".txt"), None)
    if paths is None or wrong is not None:
        raise ValueError(
            f"document: got {document}, which is for txt files, but {wrong or source.name} is divided into rows; leave "
            "it out"
        )
    origins, texts = [], []
    for path in paths:
        lines: list[int] = []
        first = 1
        for row, after in FileRows([path], document).read():
            if row is not None:
                texts.append(row["text"])
                lines.append(first)
            first = after.row + 1
        origins.append(Origin(str(path), len(lines), _digest(path), lines))
    if not texts:
        raise ValueError(f"{source.name}: got no rows with text; check the data and --text_column")
    return Table({"text": texts}, origins)


def text_column(table: Table, given: str | None) -> str:
    """The column of the text: the given one, the only one, or the one found as for fine-tuning."""
    if given is None and len(table.columns) == 1:
        return next(iter(table.columns))
    return find_columns(table, text=given, labelled=False).text


def document_texts(table: Table, column: str) -> list[str]:
    """The texts of a column, "" for a row without one; the number of such rows is logged.

    Raises:
        ValueError: a row holds something else, or there is no text at all.
    """
    values = table.columns[column]
    for i, value in enumerate(values):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{table.where(i)}: column {column!r} holds {value!r:.60}, expected a text")
    texts = [value if value and not value.isspace() else "" for value in values]
    missing = texts.count("")
    if missing == len(texts):
        raise ValueError(f"{table.name}: column {column!r} has no text")
    if missing and engine.rank() == 0:
        log.warning("%s: %d of %d rows have no text and are left out", table.name, missing, len(texts))
    return texts


def stream_head(source: RowSource, count: int = 1000) -> Table:
    """The first rows of a stream, for finding its columns."""
    rows = []
    for row, _ in source.read():
        if row is not None:
            rows.append(row)
        if len(rows) == count:
            break
    if not rows:
        raise ValueError(f"{source.name}: got no rows; check the data")
    names = dict.fromkeys(name for row in rows for name in row)
    return Table({name: [row.get(name) for row in rows] for name in names}, [Origin(source.name, len(rows), "")])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
