"""Streams of rows from data too large for memory: files of lines or row groups, or a Hub data set.

Every source reads from a cursor, three integers that give the next row, without reading earlier rows if the format
allows it: plain files are read by byte offset, parquet files by row group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from modelcenter.data.hub_datasets import hub_error, hub_library, offline_if_unreachable
from modelcenter.data.readers.compression import suffix_of
from modelcenter.data.readers.row_streams import ROW_READERS, START, Cursor, Row, Unit
from modelcenter.data.sources import find_paths

_NUMBERED_ROWS = (".parquet", ".csv", ".tsv")  # their cursors count rows, without the header, not lines


class RowSource(Protocol):
    """Rows in a fixed order."""

    name: str

    def read(self, cursor: Cursor = START) -> Iterator[tuple[Row | None, Cursor]]:
        """(row, cursor of the next row) from a cursor on; the row is None if it is empty."""
        ...

    def where(self, cursor: Cursor) -> str:
        """The location as text, for messages."""
        ...

    def fingerprint(self) -> Any:
        """JSON-serialisable; changes if the data change."""
        ...


class FileRows:
    """The rows of jsonl, txt, csv, tsv and parquet files, including compressed ones, one file after the other.

    Unlike `readers`, which reads a whole file, this takes a tsv line literally (quotes are characters), and a .json
    file must hold one object per line.

    unit: what a row of a txt file is: a line, a paragraph (lines up to an empty one) or the file.

    Raises:
        ValueError: a suffix cannot be streamed; a unit is given for files other than txt; a line is not UTF-8 or JSON,
            or has another number of columns.
    """

    def __init__(self, paths: Sequence[Path], unit: Unit = "line"):
        self.paths, self.unit = list(paths), unit
        self.name = str(self.paths[0]) + (f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else "")
        for path in self.paths:
            if suffix_of(path) not in ROW_READERS:
                raise ValueError(f"{path}: rows are streamed from {', '.join(ROW_READERS)} files")
            _check_unit(unit, path, txt=suffix_of(path) == ".txt")
            if suffix_of(path) == ".parquet" != path.suffix.lower():
                raise ValueError(f"{path}: parquet is streamed from uncompressed files; decompress it")

    def read(self, cursor: Cursor = START) -> Iterator[tuple[Row | None, Cursor]]:
        for number in range(cursor.file, len(self.paths)):
            path = self.paths[number]
            at = cursor if number == cursor.file else Cursor(number)
            yield from ROW_READERS[suffix_of(path)](path, at, self.unit)

    def where(self, cursor: Cursor) -> str:
        path = self.paths[cursor.file]
        return f"{path}, {'row' if suffix_of(path) in _NUMBERED_ROWS else 'line'} {cursor.row + 1}"

    def fingerprint(self) -> dict[str, Any]:
        """The size and a hash of both ends of each file: hashing all of it would take as long as reading the data."""
        return {str(path): [path.stat().st_size, _hash_of_ends(path)] for path in self.paths}


class HubRows:
    """Rows of a Hub data set, streamed by the `datasets` library."""

    def __init__(self, name: str, config: str | None = None, split: str = "train"):
        self.name = f"{name}{'/' + config if config else ''}:{split}"
        self._arguments = name, config, split

    def _rows(self) -> Any:
        name, config, split = self._arguments
        datasets = hub_library(name)
        try:
            with offline_if_unreachable(datasets, name):
                return datasets.load_dataset(name, config, split=split, streaming=True)
        except Exception as error:  # see sources: about twenty types
            raise hub_error(name, error) from error

    def read(self, cursor: Cursor = START) -> Iterator[tuple[Row | None, Cursor]]:
        rows = self._rows()
        for number, row in enumerate(rows.skip(cursor.row) if cursor.row else rows, cursor.row + 1):
            yield dict(row), Cursor(0, number)

    def where(self, cursor: Cursor) -> str:
        return f"{self.name}, row {cursor.row + 1}"

    def fingerprint(self) -> dict[str, Any]:
        info = self._rows().info
        return {"name": self.name, "version": str(info.version), "size": info.dataset_size}


def open_rows(data: Sequence[str], config: str | None, split: str, unit: Unit = "line") -> RowSource:
    """The rows of a split of a data argument (see `sources.find`) as a stream.

    Raises:
        ValueError: nothing is found, the split does not exist, a file cannot be streamed, or it does not have the unit.
    """
    paths = find_paths(data, config, split)
    if paths is not None:
        return FileRows(paths, unit)
    _check_unit(unit, data[0], txt=False)
    return HubRows(data[0], config, split)


def _check_unit(unit: Unit, name: Any, txt: bool) -> None:
    if unit != "line" and not txt:
        raise ValueError(f"document: got {unit}, which is for txt files, but {name} is divided into rows; leave it out")


class Texts:
    """The rows of a source that have a text in one column; None instead of the others.

    tell: called with a message at the first row without a text, and at the first without the column.

    Raises:
        ValueError: when reading: a row has something else in the column.
    """

    def __init__(self, source: RowSource, column: str, tell: Callable[[str], None] | None = None):
        self.source, self.column, self.tell = source, column, tell
        self.name, self.where, self.fingerprint = source.name, source.where, source.fingerprint
        self._warned: set[bool] = set()

    def read(self, cursor: Cursor = START) -> Iterator[tuple[Row | None, Cursor]]:
        for row, after in self.source.read(cursor):
            here = cursor if cursor.file == after.file else Cursor(after.file)
            yield (row if row is not None and self._has_text(row, here) else None), after
            cursor = after

    def _has_text(self, row: Row, cursor: Cursor) -> bool:
        text = row.get(self.column)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{self.where(cursor)}: column {self.column!r} holds {text!r:.60}, expected a text")
        if text and not text.isspace():
            return True
        known = self.column in row
        if self.tell is not None and known not in self._warned:
            self._warned.add(known)
            lacks = f"text in column {self.column!r}" if known else f"column {self.column!r} (it has {', '.join(row)})"
            self.tell(f"{self.where(cursor)}: the row has no {lacks}; such rows are left out")
        return False


def _hash_of_ends(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()
