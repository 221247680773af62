"""Compressed files, by their last suffix: gz, bz2 and xz through the standard library, zst through pyarrow."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def suffix_of(path: Path) -> str:
    """The suffix of the data, in lower case: ".jsonl" for a.jsonl and a.jsonl.gz."""
    return Path(path.stem if path.suffix.lower() in COMPRESSED else path.name).suffix.lower()


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read its bytes, decompressed.

    Raises:
        ValueError: a compressed file is damaged or truncated, or pyarrow is missing for zst.
    """
    suffix = path.suffix.lower()
    opened: Any
    errors: tuple[type[Exception], ...] = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
    if suffix == ".gz":
        opened = gzip.open(path)
    elif suffix == ".bz2":
        opened = bz2.open(path)
        errors += (OSError,)  # bz2 has no exception of its own for invalid data
    elif suffix == ".xz":
        opened = lzma.open(path)
    elif suffix == ".zst":
        opened = _open_zst(path)
        errors += (OSError,)
    else:
        opened, errors = path.open("rb"), ()
    with opened as file:
        try:
            yield file
        except errors as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(f"{path}: the {suffix[1:]} data are damaged or truncated ({error})") from None


def read_bytes(path: Path) -> bytes:
    """All bytes of a file, decompressed (see `open_bytes`)."""
    with open_bytes(path) as file:
        return file.read()


def _open_zst(path: Path) -> BinaryIO:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f"{path}: reading zst needs pyarrow (pip install pyarrow)") from None
    import io

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"), 1 << 20)
