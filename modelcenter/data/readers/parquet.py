"""Parquet files: read whole, or row by row from a given row."""

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
    """The columns of a file, and the class names that the `datasets` library wrote for some.

    Raises:
        ValueError: the file is not parquet or is damaged, two columns have one name, or pyarrow is missing.
    """
    with _opened(path, io.BytesIO(raw)) as file:
        table = file.read()
        about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        inner = {name: spec.get("feature", spec) for name, spec in about.items() if isinstance(spec, dict)}
        classes = {name: spec["names"] for name, spec in inner.items() if isinstance(spec, dict) and spec.get("names")}
        return ParsedFile(_plain_columns(table), classes=classes)


def rows_from(path: Path, start: int) -> Iterator[dict[str, Any]]:
    """The rows from number `start`, counted from 0, without reading the row groups before it.

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
    """The columns with None for NaN, at any depth: programs write NaN for a missing value, and it would be read as the
    text "nan". types: of each column, by pyarrow or `datasets`; only columns with floats are searched."""
    has_floats = {name for name, kind in types.items() if re.search("float|double", str(kind))}
    return {name: _none_for_nan(values) if name in has_floats else values for name, values in columns.items()}


def _none_for_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _none_for_nan(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        try:
            if not math.isnan(sum(value)):  # for embeddings: a NaN makes the sum NaN, and summing is far faster
                return value
        except TypeError:  # they contain something other than numbers, or a null
            pass
        return type(value)(map(_none_for_nan, value))
    return None if value != value else value


@contextmanager
def _opened(path: Path, source: Path | io.BytesIO) -> Iterator[Any]:
    """The ParquetFile of a source, with unique column names. Errors of pyarrow, also while reading in the context,
    become a ValueError that names the file: for a damaged page, pyarrow does not."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading parquet needs pyarrow (pip install pyarrow)") from None
    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            names = file.schema_arrow.names
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{path}: {', '.join(map(repr, sorted(twice)))} names two columns; rename one")
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the operating system's error names the file
        reason = " ".join(str(error).split())  # Thrift's message ends with a line end
        raise ValueError(f"{path}: not a parquet file, or a truncated or damaged one ({reason})") from None


def _plain_columns(table: Any) -> dict[str, list[Any]]:
    table = _with_plain_types(table)
    columns = {name: _values(table.column(name)) for name in table.column_names}
    return without_nan(columns, {field.name: field.type for field in table.schema})


def _values(column: Any) -> list[Any]:
    """The values of a column; as texts if one is a date or time out of the range of Python's types, such as the end of
    9999 in Shanghai, which databases write for "no end"."""
    import pyarrow

    try:
        return column.to_pylist()
    except OverflowError:
        return column.cast(pyarrow.string()).to_pylist()


def _with_plain_types(table: Any) -> Any:
    """The table with bytes that are UTF-8 converted to texts, and decimals to numbers; other bytes stay.

    Some programs (Impala, Hive, old Spark) do not mark texts as such; databases export decimals.
    """
    import pyarrow

    for i, field in enumerate(table.schema):
        plain = _plain_type(field.type)
        if plain != field.type:
            try:
                table = table.set_column(i, field.with_type(plain), table.column(i).cast(plain))
            except pyarrow.ArrowException:  # such as an image in a column that is not used
                continue
    return table


def _plain_type(kind: Any) -> Any:
    """The pyarrow type with binary replaced by string and decimals by numbers, at any depth."""
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
