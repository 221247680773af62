"""Parquet files: read whole, or row by row from a given row on."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelcenter.data.readers.parsed import ParsedFile


def read_parquet(path: Path, raw: bytes) -> ParsedFile:
    """The columns of a file, and the class names that the `datasets` library has written for some.

    Raises:
        ValueError: no parquet file, or a damaged one; two columns of one name; pyarrow is missing.
    """
    with _opened(path, io.BytesIO(raw)) as file:
        table = _with_plain_types(file.read())
        about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        inner = {name: spec.get("feature", spec) for name, spec in about.items() if isinstance(spec, dict)}
        classes = {name: spec["names"] for name, spec in inner.items() if isinstance(spec, dict) and spec.get("names")}
        return ParsedFile(table.to_pydict(), classes=classes)


def rows_from(path: Path, start: int) -> Iterator[dict[str, Any]]:
    """The rows from number `start` on, counted from 0, without reading the row groups before it.

    Raises:
        ValueError: as read_parquet, when the rows are read.
    """
    with _opened(path, path) as file:
        import pyarrow

        group = 0
        while group < file.num_row_groups and file.metadata.row_group(group).num_rows <= start:
            start, group = start - file.metadata.row_group(group).num_rows, group + 1
        for batch in file.iter_batches(1024, row_groups=list(range(group, file.num_row_groups))):
            yield from _with_plain_types(pyarrow.Table.from_batches([batch[start:]])).to_pylist()
            start = max(start - len(batch), 0)


@contextmanager
def _opened(path: Path, source: Path | io.BytesIO) -> Iterator[Any]:
    """The ParquetFile of a source, which has each column's name once. Errors of pyarrow, also those of what is read
    later, become a ValueError with the name of the file: those of a damaged page have none."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading parquet needs pyarrow (pip install pyarrow)") from None
    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            names = file.schema_arrow.names
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{path}: {', '.join(map(repr, sorted(twice)))} is the name of two columns")
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's own error, which names the file
        reason = " ".join(str(error).split())  # Thrift's ends its line
        raise ValueError(f"{path}: not a parquet file, or a truncated or damaged one ({reason})") from None


def _with_plain_types(table: Any) -> Any:
    """The table with texts in place of bytes that are UTF-8, other bytes as they are, and with numbers in place of
    decimals.

    Some programs (Impala, Hive, old Spark) write texts without marking them as such; databases export decimals.
    """
    import pyarrow

    for i, field in enumerate(table.schema):
        plain = _plain_type(field.type)
        if plain != field.type:
            try:
                table = table.set_column(i, field.with_type(plain), table.column(i).cast(plain))
            except pyarrow.ArrowException:  # an image, perhaps, in a column that nobody reads
                continue
    return table


def _plain_type(kind: Any) -> Any:
    """A type of pyarrow with strings in place of binary and numbers in place of decimals, at any depth."""
    import pyarrow
    from pyarrow import types

    if types.is_binary(kind):
        return pyarrow.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pyarrow.large_string()
    if types.is_decimal(kind):
        return pyarrow.float64() if kind.scale else pyarrow.int64()
    if types.is_dictionary(kind) and _plain_type(kind.value_type) != kind.value_type:
        return _plain_type(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind):
        of = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
        return of(kind.value_field.with_type(_plain_type(kind.value_type)))
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_plain_type(field.type)) for field in kind])
    return kind
