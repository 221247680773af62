"""csv and tsv files, with or without a header."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from modelcenter.data.readers.headers import column_names, is_header, repeated_header_error
from modelcenter.data.readers.parsed import ParsedFile
from modelcenter.data.readers.text_encoding import decode_text

MAX_FIELD_SIZE = 2**31 - 1  # csv's default of 128 kB is too low for long documents; on Windows a C long has 32 bits
_SENTENCE_NAME = re.compile(r"sent(ence)?[ _]?(#|id|idx|no|num|number)", re.IGNORECASE)
_WORD_NAMES, _TAG_NAMES = ("word", "words", "token", "tokens"), ("tag", "tags", "ner", "ner_tag", "label", "labels")
_TAG = re.compile(r"O|[BIESMLU]([-_]\S+)?")  # without a type if a corpus has a single type of entities


def read_csv(path: Path, raw: bytes) -> ParsedFile:
    """Rows with fields separated by commas, semicolons or tabs; fields that contain these or line ends are quoted."""
    text = decode_text(path, raw)
    first, end, rest = text.partition("\r" if _ends_in_carriage_returns(text) else "\n")
    delimiter, first = find_delimiter(first)
    text = first + end + rest
    return _named_columns(path, *_quoted_rows(path, text, delimiter, has_space_before_quotes(text, delimiter)))


def read_tsv(path: Path, raw: bytes) -> ParsedFile:
    """Tab-separated rows, one per line. Quotes are ordinary characters unless the file clearly quotes like CSV.

    Corpora such as SST-2 contain stray quotes, which a CSV reader would take for the start of a field, merging rows.
    """
    text = decode_text(path, raw)
    rows, numbers = _rows_between_tabs(text)
    if (quoted := _rows_of_quoted_tsv(path, text, rows)) is not None:
        rows, numbers = quoted
    return _named_columns(path, rows, numbers)


def is_quoted_tsv(path: Path, text: str) -> bool:
    """Whether a tsv file, of which this is the beginning or all, quotes its fields like CSV."""
    return _rows_of_quoted_tsv(path, text, _rows_between_tabs(text)[0]) is not None


def _rows_between_tabs(text: str) -> tuple[list[list[str]], list[int]]:
    """(the non-empty lines, split at tabs, the number of each)."""
    rows, numbers = [], []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if line and not line.isspace():
            rows.append(line.split("\t"))
            numbers.append(number)
    return rows, numbers


def _rows_of_quoted_tsv(path: Path, text: str, rows: list[list[str]]) -> tuple[list[list[str]], list[int]] | None:
    """(the rows of a tsv text that clearly quotes like CSV, the line at which each begins); None if it does not.

    rows: those of the text if quotes are ordinary characters.
    """
    opened = [value for row in rows for value in row if value[:1] == '"']
    closed = [v[1:-1] for v in opened if len(v) > 1 and v[-1] == '"' and '"' not in v[1:-1].replace('""', "")]
    ragged = len({len(row) for row in rows}) > 1
    plainly = len(closed) == len(opened) and (any('""' in v for v in closed) or len(opened) == sum(map(len, rows)))
    if not opened or not (ragged or plainly):
        return None
    try:
        as_csv = _quoted_rows(path, text, "\t")
    except ValueError:
        return None
    return as_csv if len({len(row) for row in as_csv[0]}) == 1 else None


def find_delimiter(first_line: str) -> tuple[str, str]:
    """(the separator of a csv file, its first line).

    A first line `sep=;`, which Excel does not read as a row, gives the separator, and the line is returned empty.
    Otherwise it is a comma if the line has one, else the more frequent of ; and tab.
    """
    if (said := re.match(r'"?sep=([,;\t|])"?\s*$', first_line, re.IGNORECASE)) is not None:
        return said[1], first_line[len(first_line.rstrip("\r\n")) :]
    return max((",", ";", "\t"), key=lambda d: (first_line.count(d) > 0, d == ",", first_line.count(d))), first_line


def has_space_before_quotes(text: str, delimiter: str) -> bool:
    """Whether csv has spaces before its quotes, as in a, "b". Otherwise a space belongs to the text after it."""
    return re.search(rf"[{delimiter}] +\"(?=[^\s\"{delimiter}])", text) is not None


def _quoted_rows(path: Path, text: str, delimiter: str, skip_space: bool = False) -> tuple[list[list[str]], list[int]]:
    """(the non-empty rows, the line at which each begins)."""
    rows, numbers = [], []
    limit = csv.field_size_limit(MAX_FIELD_SIZE)
    # A lone carriage return ends a line only in files of old Macs, where all line feeds are in quotes.
    lines = io.StringIO(text, newline="" if _ends_in_carriage_returns(text) else "\n")
    try:
        for row, start in csv_rows(path, lines, delimiter, skip_space):
            if any(row):
                rows.append(row)
                numbers.append(start)
    finally:
        csv.field_size_limit(limit)
    return rows, numbers


def _ends_in_carriage_returns(text: str) -> bool:
    """Whether csv has lone carriage returns, and line feeds in quotes only."""
    lines = text.rstrip("\r\n")
    return re.search(r"\r(?!\n)", lines) is not None and not any("\n" in part for part in lines.split('"')[::2])


def csv_rows(path: Path, lines: Iterable[str], delimiter: str, skip_space: bool) -> Iterator[tuple[list[str], int]]:
    """The rows in these lines (with their line ends), and the line at which each begins, from 1.

    Raises:
        ValueError: a quoted field is not closed properly, or a carriage return outside quotes does not end a line.
    """
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=skip_space, strict=True)
    start = 1
    try:
        for row in reader:
            yield row, start
            start = reader.line_num + 1
    except csv.Error as error:
        if str(error).startswith("new-line character"):
            raise ValueError(
                f"{path}, line {reader.line_num}: a carriage return (\\r) outside quotes, while lines end with line "
                "feeds; replace it by a line feed if a row ends there, otherwise remove it or quote the field"
            ) from None
        raise ValueError(
            f'{path}, line {start}: a quoted field is not closed properly ({error}); inside quotes write " as ""'
        ) from None


def _named_columns(path: Path, rows: list[list[str]], numbers: list[int]) -> ParsedFile:
    if not rows:
        return ParsedFile({}, numbers)
    width = len(rows[0])
    for row, number in zip(rows, numbers, strict=True):
        if len(row) != width:
            raise ValueError(
                f"{path}, line {number}: {len(row)} fields where the first line has {width} (in csv, quote texts that "
                "contain a separator; in tsv, remove it)"
            )
    if is_header(rows):
        names, first, rows, numbers = column_names(path, rows[0]), rows[0], rows[1:], numbers[1:]
        again = next((number for row, number in zip(rows, numbers, strict=True) if row == first), None)
        if again is not None and width > 1:  # in a single column, a text may equal the column's name
            raise repeated_header_error(path, f"line {again}")
    else:
        names = [str(i) for i in range(width)]
    columns = {name: list(values) for name, values in zip(names, zip(*rows, strict=True), strict=False)}
    return ParsedFile(*_group_by_sentence(columns, numbers))


def _group_by_sentence(columns: dict[str, list[Any]], numbers: list[int]) -> tuple[dict[str, list[Any]], list[int]]:
    """If the rows are tagged words, one row of lists per sentence, by a column that names the sentence or by empty
    lines between sentences; otherwise the rows unchanged.

    The name of a sentence may be given only in the row of its first word. A row keeps the line of its first word.
    """
    if not _are_tagged_words(columns):
        return columns, numbers
    sentence = next((name for name in columns if _SENTENCE_NAME.fullmatch(name)), None)
    filled: list[str] = []
    if sentence is None:
        starts = _after_empty_lines(columns, numbers)
    else:
        named = [value.strip() for value in columns[sentence]]
        filled = list(accumulate(named, lambda before, name: name or before))
        starts = [i for i in range(len(filled)) if i == 0 or filled[i] != filled[i - 1]]
    if len(starts) == len(numbers) or (sentence is None and len(starts) == 1):
        return columns, numbers  # rows are sentences already, or nothing separates sentences
    ends = [*starts[1:], len(numbers)]
    lists: dict[str, list[Any]] = {
        name: [values[a:b] for a, b in zip(starts, ends, strict=True)] for name, values in columns.items()
    }
    if sentence is not None:
        lists[sentence] = [filled[i] for i in starts]
    return lists, [numbers[i] for i in starts]


def _are_tagged_words(columns: dict[str, list[Any]]) -> bool:
    """Whether each row is a word with its tag: by the names of the columns or, without a header, if the last column
    holds tags such as O and B-PER; the first then holds the words."""
    lower = {name.lower() for name in columns}
    words = next((columns[name] for name in columns if name.lower() in _WORD_NAMES), None)
    if all(map(str.isdecimal, columns)) and len(columns) > 1:
        first, *_, last = columns.values()
        words = first if all(map(_TAG.fullmatch, last)) else None
    elif lower.isdisjoint(_TAG_NAMES):
        return False
    return words is not None and not any(len(word.split()) > 1 for word in words)


def _after_empty_lines(columns: dict[str, list[Any]], numbers: list[int]) -> list[int]:
    """The first row, and those after an empty line. numbers: the line at which each row begins."""
    lines = [1 + "".join(row).count("\n") for row in zip(*columns.values(), strict=True)]  # quoted fields may have many
    return [i for i in range(len(numbers)) if i == 0 or numbers[i] > numbers[i - 1] + lines[i - 1]]
