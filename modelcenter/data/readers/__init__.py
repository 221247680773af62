"""Readers of json, jsonl (ndjson), csv, tsv, parquet, txt and conll files: columns, with the location of every row.

They use the standard library: importing `datasets` takes seconds, and its readers lose the line numbers for errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from modelcenter.data.readers.compression import COMPRESSED, read_bytes, suffix_of
from modelcenter.data.readers.conll import read_conll
from modelcenter.data.readers.delimited import read_csv, read_tsv
from modelcenter.data.readers.json_files import read_json
from modelcenter.data.readers.parquet import read_parquet
from modelcenter.data.readers.parsed import ParsedFile
from modelcenter.data.readers.txt_files import read_txt
from modelcenter.data.table import Origin, Table, concatenate

READERS: dict[str, Callable[[Path, bytes], ParsedFile]] = {
    ".json": read_json,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".txt": read_txt,
    ".conll": read_conll,
    ".bio": read_conll,
}


def read_file(path: Path) -> Table:
    """Read a file by its suffix.

    Raises ValueError if the suffix is unknown, text is not UTF-8, a line is malformed (with file and line), or there
    are no rows.
    """
    suffix = suffix_of(path)
    if suffix not in READERS:
        more = f" (and {', '.join(COMPRESSED)} after these)"
        raise ValueError(f"{path}: data files end in {', '.join(READERS)}{more}, not in {path.suffix or 'nothing'!r}")
    raw = read_bytes(path)
    parsed = READERS[suffix](path, raw)
    rows = len(next(iter(parsed.columns.values()))) if parsed.columns else 0
    if not rows:
        raise ValueError(f"{path}: the file has no rows")
    origin = Origin(str(path), rows, hashlib.sha256(raw).hexdigest(), parsed.lines)
    return Table(parsed.columns, [origin], dict(parsed.classes))


def read_files(paths: Iterable[Path]) -> Table:
    """All rows of several files as one table (see `read_file`)."""
    return concatenate([read_file(path) for path in paths])
