"""Parquet files: read whole, or row by row from a given row on."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping
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
        table = file.read()
        about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        inner = {name: spec.get("feature", spec) for name, spec in about.items() if isinstance(spec, dict)}
        classes = {name: spec["names"] for name, spec in inner.items() if isinstance(spec, dict) and spec.get("names")}
        return ParsedFile(_plain_columns(table), classes=classes)


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
            columns = _plain_columns(pyarrow.Table.from_batches([batch[start:]]))
            yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
            start = max(start - len(batch), 0)


def without_nan(columns: Mapping[str, list[Any]], types: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The columns with None for NaN, at any depth: programs write it for a missing value, and it would be read as the
    text "nan". types: of each column, by pyarrow or `datasets`; only those with floats in them are looked through."""
    has_floats = {name for name, kind in types.items() if re.search("float|double", str(kind))}
    return {name: _none_for_nan(values) if name in has_floats else values for name, values in columns.items()}


def _none_for_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _none_for_nan(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        try:
            if not math.isnan(sum(value)):  # which a NaN makes NaN, in a fraction of the time: embeddings
                return value
        except TypeError:  # something other than numbers, or a null, is among them
            pass
        return type(value)(map(_none_for_nan, value))
    return None if value != value else value


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


def _plain_columns(table: Any) -> dict[str, list[Any]]:
    table = _with_plain_types(table)
    columns = {name: _values(table.column(name)) for name in table.column_names}
    return without_nan(columns, {field.name: field.type for field in table.schema})


def _values(column: Any) -> list[Any]:
    """The values of a column; as texts if one is a date or a time that Python's types cannot hold, such as the end of
    9999 in Shanghai, which databases write where something has no end."""
    import pyarrow

    try:
        return column.to_pylist()
    except OverflowError:
        return column.cast(pyarrow.string()).to_pylist()


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
