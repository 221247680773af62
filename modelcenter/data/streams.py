"""Rows one after the other, from data too large to hold: files of lines or row groups, or a Hub data set.

Every source reads on from a cursor, three integers that say which row comes next, without reading what lies before it
where the format allows: lines of plain files by their byte, parquet by its row groups.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from modelcenter.data.readers import LONGEST_FIELD, header_again, is_header, names_in, spaced
from modelcenter.data.readers.compression import COMPRESSED, open_bytes, suffix_of
from modelcenter.data.readers.literals import from_json
from modelcenter.data.readers.parquet import rows_from
from modelcenter.data.sources import find_paths, not_given


class Cursor(NamedTuple):
    """Where the next row is: its file, its row or line in it (from 0), and the byte where that starts (0: unknown)."""

    file: int = 0
    row: int = 0
    byte: int = 0


START = Cursor()
Row = dict[str, Any]


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


Unit = Literal["line", "paragraph", "file"]


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
            if suffix_of(path) not in _READ:
                raise ValueError(f"{path}: rows are streamed from {', '.join(_READ)} files")
            _check_unit(unit, path, txt=suffix_of(path) == ".txt")
            if suffix_of(path) == ".parquet" != path.suffix.lower():
                raise ValueError(f"{path}: parquet is streamed from uncompressed files; decompress it")

    def read(self, cursor: Cursor = START) -> Iterator[tuple[Row | None, Cursor]]:
        for number in range(cursor.file, len(self.paths)):
            path = self.paths[number]
            at = cursor if number == cursor.file else Cursor(number)
            yield from _READ[suffix_of(path)](path, at, self.unit)

    def where(self, cursor: Cursor) -> str:
        path = self.paths[cursor.file]
        return f"{path}, {'row' if suffix_of(path) in ('.parquet', '.csv') else 'line'} {cursor.row + 1}"

    def fingerprint(self) -> dict[str, Any]:
        """Size, and hash of the ends, of each file: all of it would take as long as a pass over the data."""
        return {str(path): [path.stat().st_size, _ends(path)] for path in self.paths}


class HubRows:
    """Rows of a Hub data set, streamed by the `datasets` library."""

    def __init__(
        self, name: str, config: str | None = None, split: str = "train", load: Callable[..., Any] | None = None
    ):
        self.name = f"{name}{'/' + config if config else ''}:{split}"
        self._arguments, self._load = (name, config, split), load

    def _rows(self) -> Any:
        load = self._load
        if load is None:
            import datasets

            load = datasets.load_dataset
        name, config, split = self._arguments
        try:
            return load(name, config, split=split, streaming=True)
        except Exception as error:  # see sources: some twenty kinds
            raise not_given(name, error) from error

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
        self._told: set[bool] = set()

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
        if self.tell is not None and known not in self._told:
            self._told.add(known)
            lacks = f"text in column {self.column!r}" if known else f"column {self.column!r} (it has {', '.join(row)})"
            self.tell(f"{self.where(cursor)}: the row has no {lacks}; such rows are left out")
        return False


def _ends(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()


def _lines(path: Path, at: Cursor) -> Iterator[tuple[str, Cursor]]:
    """Lines without their ends, and the cursor after each."""
    with open_bytes(path) as file:
        start = _skip(file, path, at)
        number, byte = start.row, start.byte
        for raw in file:
            if number == 0:
                if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise ValueError(f"{path}: is UTF-16; streaming reads UTF-8: `iconv -f UTF-16 -t UTF-8`")
                if b"\r" in raw and b"\n" not in raw:
                    raise ValueError(f"{path}: lines end as on old Macs; streaming needs line feeds: `tr '\\r' '\\n'`")
            byte, number = byte + len(raw), number + 1
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}, byte {byte - len(raw) + error.start}: not UTF-8 "
                    f"(0x{raw[error.start]:02x}); convert the line, or all of the file with `iconv`"
                ) from None
            if number == 1:
                text = text.removeprefix("\ufeff")
            yield text.rstrip("\r\n"), Cursor(at.file, number, byte)


def _skip(file: BinaryIO, path: Path, at: Cursor) -> Cursor:
    if at.byte and path.suffix.lower() not in COMPRESSED:
        file.seek(at.byte)
        return at
    byte = 0
    for _ in range(at.row):
        byte += len(file.readline())
    return Cursor(at.file, at.row, byte)


def _txt(path: Path, at: Cursor, unit: Unit) -> Iterator[tuple[Row | None, Cursor]]:
    if unit == "line":
        for text, after in _lines(path, at):
            yield ({"text": text} if text and not text.isspace() else None), after
        return
    parts: list[str] = []
    after = at
    for text, after in _lines(path, at):
        if unit == "paragraph" and not text.strip():
            if parts:
                yield {"text": "\n".join(parts)}, after
            parts = []
        else:
            parts.append(text)
    if any(part.strip() for part in parts):
        yield {"text": "\n".join(parts)}, after


def _json(path: Path, at: Cursor, unit: Unit) -> Iterator[tuple[Row | None, Cursor]]:
    for text, after in _lines(path, at):
        if not text or text.isspace():
            yield None, after
            continue
        try:
            row = from_json(text)
        except json.JSONDecodeError as error:
            array = " (a JSON array cannot be streamed: write one object a line)" if text[:1] == "[" else ""
            raise ValueError(
                f"{path}, line {after.row}: not valid JSON ({error.msg}, column {error.colno}){array}"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {after.row}: got {text[:60]}, expected one JSON object a line")
        yield row, after


def _table(path: Path, at: Cursor, unit: Unit) -> Iterator[tuple[Row | None, Cursor]]:
    """csv and tsv. Quoted fields hold line ends, so rows of csv before the cursor are read and dropped."""
    lines: Iterator[str] = (text + "\n" for text, _ in _lines(path, Cursor(at.file)))
    start = list(itertools.islice(lines, 1000))
    first = start[0] if start else ""
    lines = itertools.chain(start, lines)
    rows: Iterator[list[str]]
    if suffix_of(path) == ".tsv":
        rows = (line[:-1].split("\t") if line.strip() else [] for line in lines)
    else:
        delimiter = max((",", ";", "\t"), key=lambda d: (first.count(d) > 0, d == ",", first.count(d)))
        csv.field_size_limit(LONGEST_FIELD)
        spaces = spaced("".join(start), delimiter)
        rows = csv.reader(lines, delimiter=delimiter, skipinitialspace=spaces, strict=True)
    rows = _of_one_width(path, rows)
    head = list(itertools.islice(rows, 1001))
    filled = [row for row in head if row]
    if not filled:
        return
    named = is_header(filled)
    names = names_in(path, filled[0]) if named else [str(i) for i in range(len(filled[0]))]
    number = 0
    for row in itertools.chain(head, rows):
        if named and row is filled[0]:
            continue
        number += 1
        if named and row == filled[0] and len(row) > 1:
            raise header_again(path, f"row {number}")
        if number > at.row:
            yield (dict(zip(names, row, strict=True)) if row else None), Cursor(at.file, number)


def _of_one_width(path: Path, rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """The rows, those of empty fields as []; an error for one that is wider or narrower than the first."""
    width = number = 0
    try:
        for number, row in enumerate(rows, 1):
            if any(row):
                width = width or len(row)
                if len(row) != width:
                    raise ValueError(f"{path}, row {number}: {len(row)} fields where the first row has {width}")
            yield row if any(row) else []
    except csv.Error as error:
        raise ValueError(f"{path}, after row {number}: a quoted field is not closed properly ({error})") from None


def _parquet(path: Path, at: Cursor, unit: Unit) -> Iterator[tuple[Row | None, Cursor]]:
    for number, row in enumerate(rows_from(path, at.row), at.row + 1):
        yield row, Cursor(at.file, number)


_READ: dict[str, Callable[[Path, Cursor, Unit], Iterator[tuple[Row | None, Cursor]]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".txt": _txt,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
