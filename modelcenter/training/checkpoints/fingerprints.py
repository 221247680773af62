"""Comparing fingerprints of data, which data.sources makes: whether the rows are the same, and how they differ."""

from typing import Any

_HASHES = ("sha256", "source")  # fields of fingerprints that are keyed by the paths of files


def identity(data: Any) -> Any:
    """The part of a fingerprint that does not change when files are moved. The order of files is part of it, because
    rows are numbered, and weights are given, in this order."""
    if not isinstance(data, dict):
        return [identity(part) for part in data] if isinstance(data, list) else data
    return {
        name: list(value.values()) if name in _HASHES and isinstance(value, dict) else identity(value)
        for name, value in data.items()
    }


def differences(before: Any, now: Any) -> str:
    """How the rows and files of two fingerprints differ, in parentheses; "" if the fingerprints do not tell."""
    parts = []
    if all(isinstance(data, dict) and "rows" in data for data in (before, now)):
        parts.append(f"{_amount(now)} now, {_amount(before)} then")
    old, new = _files(before), _files(now)
    files = [f"{path} has changed" for path in old if path in new and old[path] != new[path]]
    files += [f"{path} is gone" for path in old if path not in new]
    files += [f"{path} is new" for path in new if path not in old]
    if old == new and list(old) != list(new):
        files.append("the files are in another order")
    parts += files[:5]
    return f" ({'; '.join(parts)})" if parts else ""


def _files(data: Any) -> dict[str, Any]:
    """{path: hash} of all files in a fingerprint."""
    if isinstance(data, list):
        return {path: value for part in data for path, value in _files(part).items()}
    files: dict[str, Any] = {}
    for name, value in data.items() if isinstance(data, dict) else ():
        files |= value if name in _HASHES and isinstance(value, dict) else _files(value)
    return files


def _amount(data: dict[str, Any]) -> str:
    named = (("weights", "with weights"), ("shares", "in shares of"))
    parts = [f" {words} {', '.join(f'{part:.4g}' for part in data[name])}" for name, words in named if name in data]
    return f"{data['rows']:,} rows{''.join(parts)}"
