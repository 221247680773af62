"""The formats in which verbs write rows, by file ending."""

import csv
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from modelcenter.training.output.json_text import finite, json_text

LINES = ".jsonl"
ENDINGS = (LINES, ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# Endings of known formats that cannot be written; any other unknown ending means JSON lines.
_OTHERS = frozenset(
    ".gz .tgz .bz2 .xz .zst .lz4 .zip .7z .tar .xlsx .xlsm .xls .ods .tab .pq .parq .arrow .feather .avro .orc .pkl "
    ".xml .html .yaml .yml".split()
)

Row = Mapping[str, Any]

# Dates, times, UUIDs and bytes, which rows of parquet files and of the Hub may have, become strings.
_row_text = functools.partial(json_text, default=str)


def format_of(path: str, endings: Sequence[str] = ENDINGS) -> str:
    """The ending that determines the format of a file: JSON lines if there is no known one (none, .txt, .out, a date).

    Raises:
        ValueError: the ending is of a format that is not in `endings`; parquet without pyarrow.
    """
    ending = Path(path).suffix.lower()
    if ending not in _OTHERS.union(ENDINGS):
        return LINES
    if ending not in endings:
        raise ValueError(
            f"output: {path} has the extension {ending}, expected {', '.join(endings)}, which gives the format"
        )
    if ending == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise ValueError(f"output: writing {path} needs pyarrow (pip install pyarrow)") from None
    return ending


def text_lines(rows: Iterable[Row], ending: str) -> Iterator[str]:
    """The lines of a file of rows, of any format but parquet."""
    if ending in (".csv", ".tsv"):
        return _delimited_lines(list(rows), "," if ending == ".csv" else "\t")
    return _array_lines(rows) if ending == ".json" else map(_row_text, rows)


def _array_lines(rows: Iterable[Row]) -> Iterator[str]:
    yield "["
    before: str | None = None
    for row in rows:
        if before is not None:
            yield f"{before},"
        before = _row_text(row)
    if before is not None:
        yield before
    yield "]"


class _Echo:
    """A file for a csv.writer, whose writerow then returns the line."""

    def write(self, line: str) -> str:
        return line


def _delimited_lines(rows: Sequence[Row], delimiter: str) -> Iterator[str]:
    """A header and a line per row (several lines if a field contains line ends); nothing if there are no rows."""
    if not rows:
        return
    wide = _fields_of_columns(rows)
    flat = [_flattened(row, wide) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    writer: Any = csv.writer(_Echo(), delimiter=delimiter)  # its own line ends put quotes around those in fields
    for values in (names, *([row.get(name, "") for name in names] for row in flat)):
        yield writer.writerow(values).removesuffix("\r\n").encode("utf-8", "backslashreplace").decode()


def _fields_of_columns(rows: Sequence[Row]) -> set[str]:
    """The fields that get a column for each of their values: objects of scalars in all rows that have the field."""
    filled: set[str] = set()
    whole: set[str] = set()
    for row in rows:
        for name, value in row.items():
            if isinstance(value, dict) and not any(isinstance(v, (dict, list, tuple)) for v in value.values()):
                filled |= {name} if value else set()
            elif value is not None:
                whole.add(name)
    return filled - whole


def _flattened(row: Row, wide: Collection[str]) -> dict[str, str]:
    """The fields of a row: those in `wide` get a column per value, "probabilities.good"; other objects and lists become
    JSON."""
    fields: dict[str, str] = {}
    for name, value in row.items():
        if name in wide:
            fields |= {f"{name}.{key}": _field(v) for key, v in (value or {}).items()}
        else:
            fields[name] = _field(value)
    return fields


def _field(value: Any) -> str:
    value = finite(value)
    if isinstance(value, (bool, int, float, list, dict)):
        return _row_text(value)
    return "" if value is None else str(value)


def write_parquet(rows: Sequence[Row], file: IO[bytes]) -> None:
    """Write rows with nested columns. A column with values of several types is written as JSON strings."""
    import pyarrow
    import pyarrow.parquet

    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [finite(row.get(name)) for row in rows]
        try:
            columns[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):
            columns[name] = pyarrow.array([None if value is None else _row_text(value) for value in values])
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
