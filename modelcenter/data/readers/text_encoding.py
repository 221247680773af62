"""Decoding of text files, with errors that say what to convert."""

from __future__ import annotations

import re
from pathlib import Path


def decode_text(path: Path, raw: bytes) -> str:
    """The text of a file in UTF-8, or in UTF-16 with a byte-order mark.

    Lines that end with lone carriage returns (old Macs; Excel still offers it) get line feeds.

    Raises:
        ValueError: the file is not UTF-8 (the message has the first such line, their number and a likely encoding), or
            is damaged or truncated UTF-16.
    """
    text = _decode(path, raw)
    return text.replace("\r", "\n") if "\r" in text and "\n" not in text else text


def _decode(path: Path, raw: bytes) -> str:
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            return raw.decode("utf-16")
        except UnicodeDecodeError as error:
            place = f"{error.reason}, byte {error.start}"
            raise ValueError(f"{path}: begins as UTF-16, but is damaged or truncated ({place})") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad, lines = _lines_not_utf8(raw.split(b"\n")), raw.count(b"\n") + (raw[-1:] != b"\n")
        line, byte = raw.count(b"\n", 0, error.start) + 1, raw[error.start]
        mixed = any(not piece.isascii() for i, piece in enumerate(raw.split(b"\n")) if i not in bad)
        fix = (
            "other lines are UTF-8, so the file mixes encodings; convert these lines to UTF-8"
            if mixed
            else f"convert the file, e.g. `iconv -f {_guess_encoding(raw)} -t UTF-8`"
        )
        raise ValueError(
            f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}; {len(bad)} of {lines} lines); {fix}"
        ) from None


def _lines_not_utf8(lines: list[bytes]) -> set[int]:
    bad = set()
    for i, line in enumerate(lines):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            bad.add(i)
    return bad


def _guess_encoding(raw: bytes) -> str:
    try:
        raw.decode("gb18030")
    except UnicodeDecodeError:
        return "LATIN1"
    # Chinese two-byte text has nearly all its high bytes in pairs; accented Latin letters stand alone.
    pairs = len(re.findall(rb"[\x81-\xfe]{2}", raw))
    return "GB18030" if 4 * pairs > len(re.findall(rb"[\x80-\xff]", raw)) else "LATIN1"
