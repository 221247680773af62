"""Files of rows written for a test."""

from pathlib import Path

from modelcenter.data.readers import read_file
from modelcenter.data.table import Table


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def read(tmp_path: Path, name: str, content: str | bytes) -> Table:
    return read_file(write(tmp_path / name, content))
