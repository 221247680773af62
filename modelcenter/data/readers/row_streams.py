"""Rows of a file from a cursor, for formats that can be read without loading the whole file."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from modelcenter.data.readers.compression import COMPRESSED, open_bytes, suffix_of
from modelcenter.data.readers.delimited import (
    MAX_FIELD_SIZE,
    csv_rows,
    find_delimiter,
    has_space_before_quotes,
    is_quoted_tsv,
)
from modelcenter.data.readers.headers import column_names, is_header, repeated_header_error
from modelcenter.data.readers.literals import parse_json
from modelcenter.data.readers.parquet import rows_from


class Cursor(NamedTuple):
    """The position of the next row: its file, its row or line in it (from 0), and the byte at which it starts (0:
    unknown)."""

    file: int = 0
    row: int = 0
    byte: int = 0


START = Cursor()
Row = dict[str, Any]
Unit = Literal["line", "paragraph", "file"]


def _lines(path: Path, at: Cursor, keep_ends: bool = False) -> Iterator[tuple[str, Cursor]]:
    """Lines without their ends (keep_ends: with them), and the cursor after each."""
    with open_bytes(path) as file:
        start = _skip(file, path, at)
        number, byte = start.row, start.byte
        for raw in file:
            if number == 0:
                if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise ValueError(
                        f"{path}: got UTF-16, but streams are read as UTF-8; convert it with `iconv -f UTF-16 -t UTF-8`"
                    )
                if b"\r" in raw and b"\n" not in raw:
                    raise ValueError(
                        f"{path}: lines end with carriage returns, as on old Macs, but streaming needs line feeds; "
                        "convert them with `tr '\\r' '\\n'`"
                    )
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
            yield (text if keep_ends else text.rstrip("\r\n")), Cursor(at.file, number, byte)


def _skip(file: BinaryIO, path: Path, at: Cursor) -> Cursor:
    if at.byte and path.suffix.lower() not in COMPRESSED:
        file.seek(at.byte)
        return at
    byte = 0
    for _ in range(at.row):
        byte += len(file.readline())
    return Cursor(at.file, at.row, byte)


def _txt_rows(path: Path, at: Cursor, unit: Unit) -> Iterator[tuple[Row | None, Cursor]]:
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


def _json_rows(path: Path, at: Cursor, unit: Unit) -> Iterator[tuple[Row | None, Cursor]]:
    for text, after in _lines(path, at):
        if not text or text.isspace():
            yield None, after
            continue
        try:
            row = parse_json(text)
        except json.JSONDecodeError as error:
            array = " (a JSON array cannot be streamed: write one object per line)" if text[:1] == "[" else ""
            raise ValueError(
                f"{path}, line {after.row}: not valid JSON ({error.msg}, column {error.colno}){array}"
            ) from None
        if not isinstance(row, dict):
            array = "; a JSON array cannot be streamed" if isinstance(row, list) else ""
            raise ValueError(f"{path}, line {after.row}: got {text[:60]}, expected one JSON object per line{array}")
        yield row, after


def _delimited_rows(path: Path, at: Cursor, unit: Unit) -> Iterator[tuple[Row | None, Cursor]]:
    """csv and tsv. Quoted fields may contain line ends, so csv rows before the cursor are read and discarded."""
    lines: Iterator[str] = (text for text, _ in _lines(path, Cursor(at.file), keep_ends=True))  # quoted ones are text
    rows: Iterator[list[str]]
    start = _first_lines(lines)
    delimiter, quoted = "\t", True
    if suffix_of(path) == ".tsv":
        quoted = is_quoted_tsv(path, "".join(start))
    elif start:
        delimiter, start[0] = find_delimiter(start[0])
    lines = itertools.chain(start, lines)
    if quoted:
        csv.field_size_limit(MAX_FIELD_SIZE)
        skip_space = delimiter != "\t" and has_space_before_quotes("".join(start), delimiter)
        rows = (row for row, _ in csv_rows(path, lines, delimiter, skip_space))
    else:
        rows = (line.rstrip("\r\n").split("\t") if line.strip() else [] for line in lines)
    rows = _check_width(path, rows)
    head = list(itertools.islice(rows, 1001))
    filled = [row for row in head if row]
    if not filled:
        return
    named = is_header(filled)
    names = column_names(path, filled[0]) if named else [str(i) for i in range(len(filled[0]))]
    number = 0
    for row in itertools.chain(head, rows):
        if named and row is filled[0]:
            continue
        number += 1
        if named and row == filled[0] and len(row) > 1:
            raise repeated_header_error(path, f"row {number}")
        if number > at.row:
            yield (dict(zip(names, row, strict=True)) if row else None), Cursor(at.file, number)


def _first_lines(lines: Iterator[str]) -> list[str]:
    """The lines by which the format of a file is told: 1,000, and those up to the end of a quoted field in the last."""
    first = list(itertools.islice(lines, 1000))
    quotes = sum(line.count('"') for line in first)
    while quotes % 2 and len(first) < 10_000 and (line := next(lines, None)) is not None:
        first.append(line)
        quotes += line.count('"')
    return first


def _check_width(path: Path, rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """The rows, those with only empty fields as []. Raises ValueError if a row is wider or narrower than the first."""
    width = 0
    for number, row in enumerate(rows, 1):
        if any(row):
            width = width or len(row)
            if len(row) != width:
                raise ValueError(f"{path}, row {number}: {len(row)} fields where the first row has {width}")
        yield row if any(row) else []


def _parquet_rows(path: Path, at: Cursor, unit: Unit) -> Iterator[tuple[Row | None, Cursor]]:
    for number, row in enumerate(rows_from(path, at.row), at.row + 1):
        yield row, Cursor(at.file, number)


ROW_READERS: dict[str, Callable[[Path, Cursor, Unit], Iterator[tuple[Row | None, Cursor]]]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".txt": _txt_rows,
    ".csv": _delimited_rows,
    ".tsv": _delimited_rows,
    ".parquet": _parquet_rows,
}
