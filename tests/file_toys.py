"""Files and tables of rows made for a test."""

from pathlib import Path
from typing import Any

from modelcenter.data.readers import read_file
from modelcenter.data.table import Origin, Table


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def read(tmp_path: Path, name: str, content: str | bytes) -> Table:
    return read_file(write(tmp_path / name, content))


def table(**columns: list[Any]) -> Table:
    """A table of these columns, as if read from a.jsonl."""
    rows = len(next(iter(columns.values())))
    return Table(columns, [Origin("a.jsonl", rows, "0", range(1, rows + 1))])
