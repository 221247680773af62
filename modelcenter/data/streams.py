"""Rows one after the other, from data too large to hold: files of lines or row groups, or a Hub data set.

Every source reads on from a cursor, three integers that say which row comes next, without reading what lies before it
where the format allows: lines of plain files by their byte, parquet by its row groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from modelcenter.data.readers.compression import suffix_of
from modelcenter.data.readers.row_streams import ROW_READERS, START, Cursor, Row, Unit
from modelcenter.data.sources import find_paths, hub_error, hub_library

_NUMBERED_ROWS = (".parquet", ".csv", ".tsv")  # of which cursors count rows, without the header, and not lines


class RowSource(Protocol):
    """Rows in a fixed order."""

    name: str

    def read(self, cursor: Cursor = START) -> Iterator[tuple[Row | None, Cursor]]:
        """(row, cursor of the one after it) from a cursor on; None for an empty one."""
        ...

    def where(self, cursor: Cursor) -> str:
        """The place in words, for messages."""
        ...

    def fingerprint(self) -> Any:
        """JSON-able; changes when the data does."""
        ...


class FileRows:
    """Rows of jsonl, txt, csv, tsv and parquet files, one file after the other; compressed ones too.

    Unlike `readers`, which sees a whole file, this takes a tsv line as it is (quotes are characters), and a .json file
    has to hold one object a line.

    unit: what a row of a txt file is: a line, a paragraph (lines up to an empty one) or the file.

    Raises:
        ValueError: a suffix that cannot be streamed; a unit of files that are not txt; a line that is not UTF-8, JSON
            or as wide as the others.
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
        """Size, and hash of the ends, of each file: all of it would take as long as a pass over the data."""
        return {str(path): [path.stat().st_size, _hash_of_ends(path)] for path in self.paths}


class HubRows:
    """Rows of a Hub data set, streamed by the `datasets` library."""

    def __init__(
        self, name: str, config: str | None = None, split: str = "train", load: Callable[..., Any] | None = None
    ):
        self.name = f"{name}{'/' + config if config else ''}:{split}"
        self._arguments, self._load = (name, config, split), load

    def _rows(self) -> Any:
        name, config, split = self._arguments
        load = self._load or hub_library(name).load_dataset
        try:
            return load(name, config, split=split, streaming=True)
        except Exception as error:  # see sources: some twenty kinds
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
        ValueError: nothing is there, no such split, a file that cannot be streamed, a unit that it does not have.
    """
    paths = find_paths(data, config, split)
    if paths is not None:
        return FileRows(paths, unit)
    _check_unit(unit, data[0], txt=False)
    return HubRows(data[0], config, split)


def _check_unit(unit: Unit, name: Any, txt: bool) -> None:
    if unit != "line" and not txt:
        raise ValueError(f"document: {unit} is for txt files, but {name} has rows of its own")


class Texts:
    """The rows of a source that have a text in one column; None in the place of others.

    tell: called with a message at the first row without a text, and at the first without even the column.

    Raises:
        ValueError: when it is read: a row that has something else there.
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
