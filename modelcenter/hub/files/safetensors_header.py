"""The header of a safetensors file, read and checked against the file's size. Imports no torch."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from modelcenter.hub.files.git_lfs import refuse_lfs_pointer
from modelcenter.hub.files.json_files import unique_keys

# Bits per element, by the format's name of the dtype; torch has only some of them.
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_HEADER_LIMIT = 100 * 2**20  # as in the safetensors library


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor: the format's name of its dtype, its shape, and the first byte of its data in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata.

    Raises:
        ValueError: it is not a safetensors file, truncated (with the expected and actual sizes), or inconsistent.
    """
    refuse_lfs_pointer(path)
    header, data_start = _parse(path)
    metadata = header.pop("__metadata__", None) or {}
    spans, tensors = [], {}
    for name, entry in header.items():
        dtype, shape, begin, end = _parse_entry(path, name, entry)
        spans.append((begin, end, name))
        tensors[name] = HeaderEntry(dtype, tuple(shape), data_start + begin)
    _check_spans(path, spans, data_start)
    return tensors, metadata


def _invalid(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is not a valid safetensors file: {why}")


def _parse(path: Path) -> tuple[dict[str, Any], int]:
    """The header as JSON, and the byte at which the data starts."""
    actual = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _invalid(path, f"it has {actual} bytes, but a header has at least 8")
        (length,) = struct.unpack("<Q", start)
        if length > _HEADER_LIMIT:
            raise _invalid(path, f"its header claims {length} bytes (the limit is {_HEADER_LIMIT})")
        if 8 + length > actual:
            expected = f"expected at least {8 + length} bytes, the file has {actual}"
            raise _invalid(path, f"it is truncated inside the header: {expected}")
        try:
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise _invalid(path, f"its header does not parse ({error})") from None
    if not isinstance(header, dict):
        raise _invalid(path, "its header is not an object")
    return header, 8 + length


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[str, list[int], int, int]:
    """dtype, shape, first byte and end of a tensor, relative to the start of the data."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        plain = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        known = dtype in _BITS
    except (TypeError, KeyError, ValueError):
        raise _invalid(path, f"the entry of tensor {name!r} is malformed: {str(entry)[:200]}") from None
    if not plain or end < begin:
        raise _invalid(path, f"the entry of tensor {name!r} has impossible numbers: {str(entry)[:200]}")
    if not known:
        raise _invalid(path, f"tensor {name!r} has the dtype {dtype!r}; the format has {', '.join(_BITS)}")
    if prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise _invalid(
            path, f"tensor {name!r} of shape {shape} and dtype {dtype} does not fill its {end - begin} bytes"
        )
    return dtype, shape, begin, end


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_start: int) -> None:
    """Raise ValueError unless the tensors are contiguous and end where the file does."""
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise _invalid(path, f"tensor {name!r} starts at byte {begin} of the data, expected {position}")
        position = end
    expected, actual = data_start + position, path.stat().st_size
    if expected != actual:
        cut = "truncated" if actual < expected else "longer than its header says"
        raise _invalid(path, f"it is {cut}: expected {expected} bytes, the file has {actual}")
