"""Tokenised documents on disk, memory-mapped for pretraining.

A folder holds
    tokens.bin     the tokens of all documents end to end: uint16 where the vocabulary has at most 65,536 tokens, else
                   uint32, little-endian
    offsets.bin    int64 (documents + 1,), little-endian: document i is tokens[offsets[i]:offsets[i + 1]]
    about.json     {format, version, dtype, documents, tokens, sha256: {file: hash},
                   tokenizer: {name, vocab_size, sha256}, eos: the token at the end of each document, or null, ...}
It is complete or absent: the writer works in a temporary folder next to it, which it renames at the end.

Megatron's pairs NAME.bin and NAME.idx are read as they are. The .idx is: "MMIDIDX\\0\\0", version (uint64, 1), type
of a token (uint8: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16), number of sequences (uint64), number of
document bounds (uint64); then the length of each sequence (int32), the byte in .bin where it starts (int64), and the
bounds: document i is the sequences bounds[i] to bounds[i + 1] (int64).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import secrets
import shutil
import socket
import struct
import time
from contextlib import suppress
from glob import escape
from os.path import expanduser
from pathlib import Path
from typing import Any

import numpy as np

from modelcenter._paths import naming_full_disk
from modelcenter.data.cache import mapped, tokenizer_state

FORMAT, VERSION = "modelcenter-tokens", 1
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_ABANDONED = 3600  # seconds without a write after which the process of another machine's folder counts as killed
_SAMPLE = 1000  # documents whose ends are checked
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class TokenFile:
    """Documents of tokens in a file, mapped into memory.

    tokens: (T,) of the file's integer type; offsets: int64 (n + 1,); about: its about.json, or an equivalent.
    """

    def __init__(self, path: Path, tokens: np.ndarray, offsets: np.ndarray, about: dict[str, Any]):
        self.path, self.tokens, self.offsets, self.about = path, tokens, offsets, about

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def eos(self) -> int | None:
        """The token that ends each document in the file; None if none was added."""
        return self.about.get("eos")

    def document(self, i: int) -> np.ndarray:
        """All tokens of document i."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def fingerprint(self) -> dict[str, Any]:
        """JSON-serialisable; changes if the data change."""
        return {name: self.about.get(name) for name in ("documents", "tokens", "dtype", "sha256", "eos")}

    def check(self) -> None:
        """Read the files and compare their hashes with those at writing (for Megatron's index: at opening).

        Raises:
            ValueError: a file has changed since then.
        """
        for name, expected in self.about.get("sha256", {}).items():
            file = self.path.with_name(name) if self.about["format"] == "megatron" else self.path / name
            digest = _sha256(file)
            if digest != expected:
                raise ValueError(
                    f"{file}: got SHA-256 {digest}, expected {expected}; the file has changed, write it again"
                )


def open_tokens(path: str | os.PathLike[str]) -> TokenFile:
    """Map a folder of tokens, or Megatron's pair given by its .bin, its .idx or the name without either.

    Raises:
        ValueError: there is neither, or sizes and header do not match.
    """
    path = Path(expanduser(path))
    if (path / "about.json").is_file():
        return _open_folder(path)
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = Path(f"{stem}.bin"), Path(f"{stem}.idx")
    if all(p.is_file() for p in pair):
        return _open_megatron(stem, *pair)
    missing = next((str(p) for p in pair if not p.is_file() and any(q.is_file() for q in pair)), None)
    if missing and (path.parent / "about.json").is_file():
        raise ValueError(f"{path}: this file is part of a folder of tokens; give the folder, {path.parent}")
    raise ValueError(
        f"{path}: {missing} is missing, so the size of tokens and the ends of documents are unknown; `modelcenter "
        "preprocess` makes a folder of tokens from text"
        if missing
        else f"{path}: neither a folder of tokens (about.json) nor Megatron's pair .bin and .idx; `modelcenter "
        "preprocess` makes a folder from text"
    )


def is_tokens(path: str | os.PathLike[str]) -> bool:
    """Whether a path is meant for `open_tokens`, even if some of its files are missing."""
    path = Path(expanduser(path))
    if path.suffix in (".bin", ".idx") and path.is_file():
        return True
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return (path / "about.json").is_file() or (Path(f"{stem}.bin").is_file() and Path(f"{stem}.idx").is_file())


def check_tokenizer(file: TokenFile, tokenizer: Any) -> None:
    """Raise ValueError if the file was written with another tokenizer. Megatron's pairs do not record theirs."""
    recorded = file.about.get("tokenizer")
    if recorded is None:
        return
    digest = hashlib.sha256(tokenizer_state(tokenizer).encode()).hexdigest()
    if recorded["sha256"] != digest:
        raise ValueError(
            f"tokenizer: {file.path} was made with {recorded['name']!r} ({recorded['vocab_size']:,} tokens), not with "
            f"{tokenizer.name_or_path!r} ({len(tokenizer):,}); use that tokenizer, or preprocess the texts again"
        )


def with_end(file: TokenFile, end: int | None) -> TokenFile:
    """The file with `end` as its eos if it records none, but most of its first thousand documents end in that token.

    Megatron writes such files with --append-eod. Otherwise each document would get a second end token.
    """
    if file.eos is not None or end is None:
        return file
    sizes = np.diff(file.offsets[: _SAMPLE + 1])
    last = file.tokens[file.offsets[1 : _SAMPLE + 1][sizes > 0] - 1]
    if 2 * int((last == end).sum()) <= len(last):
        return file
    return TokenFile(file.path, file.tokens, file.offsets, {**file.about, "eos": end})


def _open_folder(path: Path) -> TokenFile:
    try:
        about = json.loads((path / "about.json").read_text(encoding="utf-8"))
        name, version = about.get("format"), about.get("version")
        if (name, version) != (FORMAT, VERSION):
            raise ValueError(f"{path}: format {name!r} version {version}, expected {FORMAT!r} version {VERSION}")
        documents, count, dtype = int(about["documents"]), int(about["tokens"]), np.dtype(about["dtype"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path / 'about.json'}: damaged ({error}); write the folder again") from None
    offsets = _map(path / "offsets.bin", "<i8", documents + 1)
    if int(offsets[-1]) != count:
        raise ValueError(f"{path / 'offsets.bin'}: ends at {int(offsets[-1])}, but about.json gives {count} tokens")
    return TokenFile(path, _map(path / "tokens.bin", dtype, count), offsets, about)


def _map(path: Path, dtype: Any, count: int) -> np.ndarray:
    dtype = np.dtype(dtype)
    size = path.stat().st_size if path.is_file() else None
    if size != count * dtype.itemsize:
        actual = "missing" if size is None else f"{size} bytes"
        raise ValueError(
            f"{path}: {actual}, expected {count * dtype.itemsize} bytes ({count} of {dtype}); it is truncated"
        )
    return mapped(lambda mode: np.memmap(path, dtype, mode, shape=(count,))) if count else np.zeros(0, dtype)


def _open_megatron(stem: Path, data: Path, index: Path) -> TokenFile:
    with index.open("rb") as head:
        raw = head.read(_HEADER.size)
    if len(raw) < _HEADER.size or raw[:9] != _MAGIC:
        raise ValueError(f"{index}: does not start like Megatron's memory-mapped index ({_MAGIC!r})")
    _, version, code, sequences, bounds = _HEADER.unpack(raw)
    if version != 1 or code not in _DTYPES:
        raise ValueError(f"{index}: version {version}, type code {code}; expected version 1 and one of {list(_DTYPES)}")
    dtype = np.dtype(_DTYPES[code])
    needed = _HEADER.size + 12 * sequences + 8 * bounds
    if index.stat().st_size < needed:  # more is allowed: multimodal data have modes at the end
        raise ValueError(f"{index}: {index.stat().st_size} bytes, but its header gives {needed}; it is truncated")
    whole = mapped(lambda mode: np.memmap(index, np.uint8, mode))
    at = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * bounds])
    lengths, pointers, documents = (whole[at[i] : at[i + 1]].view(kind) for i, kind in enumerate(("<i4", "<i8", "<i8")))
    # Sequences are contiguous in such files, so that a document is one run of tokens; check that the pointers agree.
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if bool((pointers // dtype.itemsize != starts[:-1]).any()):
        raise ValueError(
            f"{index}: its sequences are not contiguous in {data.name}; only files with contiguous sequences can be "
            "read"
        )
    if not bounds or documents[0] != 0 or documents[-1] != sequences or bool((np.diff(documents) < 0).any()):
        raise ValueError(f"{index}: the document bounds do not run from 0 to {sequences}, the number of sequences")
    offsets = starts[documents]
    tokens = _map(data, dtype, int(starts[-1]))
    about = {"format": "megatron", "dtype": dtype.str, "documents": len(offsets) - 1, "tokens": len(tokens)}
    # Hashing hundreds of gigabytes at each start takes too long; the index changes whenever documents do.
    about["sha256"] = {index.name: _sha256(index)}
    return TokenFile(stem, tokens, offsets, about)


class TokenWriter:
    """Writes a folder of tokens, document by document; use it in a `with` block.

    The folder appears under its name when the block ends, and not at all after an error. Memory: one buffer.

    path: the folder to create; it must not exist, or must be empty.
    vocab_size: determines the integer type. eos: the token with which the caller ends each document, recorded for
        readers. about: more fields of about.json.

    Raises:
        ValueError: the folder exists, or another process is writing it; a token is not below vocab_size.
    """

    def __init__(
        self, path: str | os.PathLike[str], vocab_size: int, eos: int | None = None, about: dict[str, Any] | None = None
    ):
        self.path = Path(expanduser(path))
        self._check_absent()
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.vocab_size, self.eos, self._extra = vocab_size, eos, dict(about or {})
        self.documents = self.tokens = 0

    def __enter__(self) -> TokenWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        self._work = self.path.parent / f".{self.path.name}-{_this_machine()}{secrets.token_hex(4)}"
        begun = self._work.with_name(self._work.name + "-begun")  # others find it only once it is locked
        begun.mkdir()  # with default permissions, unlike mkdtemp's
        self._files = {name: (begun / name).open("wb") for name in ("tokens.bin", "offsets.bin")}
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._files["tokens.bin"], fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        begun.rename(self._work)
        self._hashes = {name: hashlib.sha256() for name in self._files}
        self._put("offsets.bin", np.zeros(1, "<i8"))
        return self

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of the given lengths, whose tokens are concatenated in `ids`."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(
                f"token {int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())} is not in a vocabulary of "
                f"{self.vocab_size} tokens"
            )
        assert int(lengths.sum()) == len(ids)
        self._put("tokens.bin", ids.astype(self.dtype, copy=False))
        self._put("offsets.bin", (self.tokens + np.cumsum(lengths)).astype("<i8"))
        self.documents, self.tokens = self.documents + len(lengths), self.tokens + len(ids)

    def note(self, **about: Any) -> None:
        """Add fields to about.json."""
        self._extra.update(about)

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            with naming_full_disk(self.path):
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())
                if kind is None:
                    self._write_about()
                for file in self._files.values():  # last, because this releases the lock
                    file.close()
            if kind is None:
                self._check_absent()
                self._work.rename(self.path)  # also replaces an empty folder
        finally:
            shutil.rmtree(self._work, ignore_errors=True)

    def _check_absent(self) -> None:
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise ValueError(f"{self.path}: exists already; remove it, or give another folder")

    def _remove_abandoned(self) -> None:
        """Remove the partial folders of killed processes for this path. Raises ValueError if one is still writing."""
        for tokens in self.path.parent.glob(f".{escape(self.path.name)}-{'[0-9a-f]' * 16}/tokens.bin"):
            work = tokens.parent
            try:
                with tokens.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # On some network file systems, locks of other machines are not visible.
                    if work.name[-16:-8] == _this_machine() or time.time() - tokens.stat().st_mtime > _ABANDONED:
                        shutil.rmtree(work, ignore_errors=True)
            except BlockingIOError:
                raise ValueError(f"{self.path}: another process is writing it; give another folder") from None
            except OSError:  # no locks, or another user's: unknown whether it is abandoned
                continue

    def _write_about(self) -> None:
        about = {
            "format": FORMAT, "version": VERSION, "dtype": self.dtype.str, "documents": self.documents,
            "tokens": self.tokens, "eos": self.eos,
            "sha256": {name: h.hexdigest() for name, h in self._hashes.items()}, **self._extra,
        }  # fmt: skip
        with (self._work / "about.json").open("w", encoding="utf-8", errors="backslashreplace") as text:
            json.dump(about, text, indent=2, ensure_ascii=False)
            text.flush()
            os.fsync(text.fileno())

    def _put(self, name: str, array: np.ndarray) -> None:
        raw = np.ascontiguousarray(array).view(np.uint8).data if array.size else b""
        with naming_full_disk(self.path):
            self._files[name].write(raw)
        self._hashes[name].update(raw)


@functools.cache
def _this_machine() -> str:
    """8 digits that identify the running kernel, among whose processes locks work on any file system."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
