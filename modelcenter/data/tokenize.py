"""Texts to token ids, once: batched, kept as flat arrays and cached on disk by the content they came from."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)
_CHUNK = 16384  # rows per call of the tokenizer: enough to use all threads, little enough to hold as Python objects
_VERSION = 1  # part of the cache's key: raise it when the files or the way of tokenising change


@dataclass(frozen=True)
class Tokens:
    """Token ids of n rows, end to end.

    ids: int32 (T,); offsets: int64 (n+1,), row i is ids[offsets[i]:offsets[i+1]]; type_ids: uint8 (T,), or None if all
    are 0.
    truncated: how many rows were cut at max_length.
    """

    ids: np.ndarray
    offsets: np.ndarray
    type_ids: np.ndarray | None
    truncated: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 (n,)."""
        return np.diff(self.offsets)

    def row(self, i: int) -> np.ndarray:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]


def tokenize(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int, cache: bool = True
) -> Tokens:
    """Tokenise rows, or read them from the cache where these very texts were tokenised so before.

    tokenizer: a transformers tokenizer; texts, pairs: n strings each; max_length: rows are cut to it, special tokens
    included.
    Ranks of one node share the work: one tokenises, the others wait for its files. Raises ValueError for an empty set
    of rows.
    """
    if not len(texts):
        raise ValueError("there are no rows to tokenise")
    folder = cache_dir() if cache else None
    if folder is None:
        return _tokenize(tokenizer, texts, pairs, max_length)
    entry = folder / _key(tokenizer, texts, pairs, max_length)
    with _lock(entry.with_suffix(".lock")):
        tokens = _load(entry)
        if tokens is None:
            tokens = _tokenize(tokenizer, texts, pairs, max_length)
            _save(entry, tokens)
    return tokens


def cache_dir() -> Path | None:
    """The folder of tokenised data: $MODELCENTER_CACHE, else modelcenter under the user's cache folder; None if not
    writable."""
    root = os.environ.get("MODELCENTER_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "modelcenter"
    )
    folder = Path(root).expanduser() / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        log.warning(
            "token cache %s is not writable (%s): tokenising without it; MODELCENTER_CACHE names another", folder, error
        )
        return None


def _tokenize(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> Tokens:
    encode = _fast(tokenizer, max_length) if tokenizer.is_fast else _slow(tokenizer, max_length)
    ids, types, lengths, truncated = [], [], [], 0
    with encode as run:
        for start in range(0, len(texts), _CHUNK):
            chunk = list(texts[start : start + _CHUNK])
            rows = run(chunk if pairs is None else list(zip(chunk, pairs[start : start + _CHUNK], strict=True)))
            size = [len(row[0]) for row in rows]
            lengths += size
            ids.append(np.fromiter(itertools.chain.from_iterable(row[0] for row in rows), np.int32, sum(size)))
            types.append(np.fromiter(itertools.chain.from_iterable(row[1] for row in rows), np.uint8, sum(size)))
            truncated += sum(row[2] for row in rows)
    type_ids = np.concatenate(types)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return Tokens(np.concatenate(ids), offsets, type_ids if type_ids.any() else None, truncated)


_Rows = list[tuple[Sequence[int], Sequence[int], bool]]  # ids, type ids, whether the row was cut


@contextmanager
def _fast(tokenizer: Any, max_length: int) -> Iterator[Callable[[list[Any]], _Rows]]:
    """The Rust tokenizer itself: its transformers wrapper spends a third of the time on building dictionaries."""
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding  # restored, or they would be saved with the tokenizer
    backend.no_padding()
    backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    try:
        yield lambda batch: [(e.ids, e.type_ids, bool(e.overflowing)) for e in backend.encode_batch_fast(batch)]
    finally:
        backend.no_truncation()
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


@contextmanager
def _slow(tokenizer: Any, max_length: int) -> Iterator[Callable[[list[Any]], _Rows]]:
    def run(batch: list[Any]) -> _Rows:
        rows: _Rows = []
        for item in batch:
            first, second = item if isinstance(item, tuple) else (item, None)
            full = tokenizer(first, second, return_token_type_ids=True)
            cut = tokenizer(first, second, truncation=True, max_length=max_length, return_token_type_ids=True)
            rows.append((cut["input_ids"], cut["token_type_ids"], len(full["input_ids"]) > max_length))
        return rows

    yield run


def _key(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> str:
    digest = hashlib.blake2b(digest_size=20)
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.pop("truncation", None), state.pop("padding", None)
        tokenizer_state = json.dumps(state, sort_keys=True)
    else:
        tokenizer_state = json.dumps(
            [sorted(tokenizer.get_vocab().items()), type(tokenizer).__name__, str(tokenizer.init_kwargs)]
        )
    about = [_VERSION, max_length, tokenizer.truncation_side, pairs is not None, len(texts)]
    digest.update(json.dumps(about).encode())
    digest.update(tokenizer_state.encode())
    for column in (texts, pairs or ()):
        for start in range(0, len(column), _CHUNK):
            # Lengths make the boundaries part of the key: ["ab", "c"] is not ["a", "bc"].
            chunk = column[start : start + _CHUNK]
            digest.update(np.fromiter(map(len, chunk), np.int64, len(chunk)).tobytes())
            digest.update("".join(chunk).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process of the node; freed by the system when it ends, however it ends. Without flock everyone
    tokenises."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            log.debug("no file locks on %s", path)
        yield


def _load(entry: Path) -> Tokens | None:
    if not entry.is_dir():
        return None
    try:
        about = json.loads((entry / "about.json").read_text())
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in about["arrays"]}
        if {name: list(array.shape) for name, array in arrays.items()} != about["arrays"]:
            raise ValueError("array sizes differ from about.json")
        return Tokens(arrays["ids"], arrays["offsets"], arrays.get("type_ids"), about["truncated"])
    except (OSError, ValueError, KeyError) as error:
        log.warning("token cache entry %s is damaged (%s): tokenising again", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _save(entry: Path, tokens: Tokens) -> None:
    arrays = {"ids": tokens.ids, "offsets": tokens.offsets, "type_ids": tokens.type_ids}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    try:
        work = Path(tempfile.mkdtemp(prefix=".writing-", dir=entry.parent))
        try:
            for name, array in arrays.items():
                np.save(work / f"{name}.npy", array)
            about = {
                "arrays": {name: list(array.shape) for name, array in arrays.items()},
                "truncated": tokens.truncated,
            }
            (work / "about.json").write_text(json.dumps(about))
            work.rename(entry)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:  # a full disk, or another node that was first: the tokens are in memory all the same
        log.warning("token cache entry %s was not written: %s", entry, error)
