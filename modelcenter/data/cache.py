"""A cache on disk for arrays that take long to compute, addressed by the content from which they are computed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from os.path import expanduser
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)
_VERSION = 2  # part of every key: raise it when the files change
_CHUNK = 16384
# Arguments of a Python tokenizer on which no token depends: its origin, repeated information, and settings for rows.
# Saving a tokenizer adds some of these.
_OF_NO_TOKEN = {
    "name_or_path", "is_local", "local_files_only", "backend", "auto_map", "tokenizer_file", "vocab_file",
    "tokenizer_class", "processor_class", "model_specific_special_tokens", "chat_template", "model_max_length",
    "padding_side", "truncation_side",
}  # fmt: skip


def cached(
    key: Iterable[Any], build: Callable[[], dict[str, np.ndarray]], *, cache: bool = True
) -> dict[str, np.ndarray]:
    """The result of `build`, or its earlier result for the same key, memory-mapped from the cache.

    Processes of a node share the work: one builds, the others wait for its files. A damaged entry is built again;
    without a writable folder the arrays are built and not stored.

    key: everything on which the result depends, including the version of the code: numbers, strings, arrays, None, and
        sequences of strings (columns of texts). The texts of a million rows are hashed in a second or less.
    build: returns {name: array}, with arrays of one dimension or more.
    """
    folder = cache_dir() if cache else None
    if folder is None:
        return build()
    entry = folder / digest(key)
    with _lock(entry.with_suffix(".lock")) as is_first:
        arrays = _load(entry)
        if arrays is None and is_first:
            _remove_abandoned(entry)
            return _build_and_save(entry, build)
    # The first process could not store its result: the others build at the same time, outside the lock.
    return _build_and_save(entry, build) if arrays is None else arrays


def _build_and_save(entry: Path, build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    arrays = build()
    _save(entry, arrays)
    return arrays


def _remove_abandoned(entry: Path) -> None:
    """Remove the partial entries of killed processes, except recent ones: the lock may not extend beyond this node."""
    for work in entry.parent.glob(f"{_work_name(entry)}*"):
        with suppress(OSError):
            if time.time() - work.stat().st_mtime > 3600:
                shutil.rmtree(work, ignore_errors=True)


def cache_dir() -> Path | None:
    """The folder of tokenised data: $MODELCENTER_CACHE, else modelcenter under the user's cache folder; None if not
    writable."""
    root = os.environ.get("MODELCENTER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "modelcenter")
    folder = Path(expanduser(root)) / "tokens"
    if folder.parts[0] == "~":  # the user has no home, as in some containers
        log.warning(
            "no token cache, because there is no home folder: tokenising without it; set MODELCENTER_CACHE to a folder "
            "to use one"
        )
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        log.warning(
            "token cache %s is not writable (%s): tokenising without it; set MODELCENTER_CACHE to another folder",
            folder,
            error,
        )
        return None


def digest(key: Iterable[Any]) -> str:
    """A hash of the parts of a key: of their types, order and boundaries, not of their bytes alone."""
    state = hashlib.blake2b(digest_size=20)
    state.update(f"{_VERSION}".encode())
    for part in key:
        if isinstance(part, np.ndarray):
            state.update(f"array {part.dtype.str} {part.shape}\n".encode())
            state.update(np.ascontiguousarray(part).view(np.uint8).data if part.size else b"")
        elif isinstance(part, Sequence) and not isinstance(part, (str, bytes)):
            _update_with_texts(state, part)
        else:
            shown = json.dumps(part) if not isinstance(part, bytes) else part.hex()
            state.update(f"{type(part).__name__} {len(shown)}\n{shown}".encode())
    return state.hexdigest()


def _update_with_texts(state: Any, texts: Sequence[str]) -> None:
    state.update(f"texts {len(texts)}\n".encode())
    for start in range(0, len(texts), _CHUNK):
        # Lengths make the boundaries part of the key: ["ab", "c"] is not ["a", "bc"].
        chunk = texts[start : start + _CHUNK]
        state.update(np.fromiter(map(len, chunk), np.int64, len(chunk)).tobytes())
        state.update("".join(chunk).encode("utf-8", "surrogatepass"))


def tokenizer_state(tokenizer: Any) -> str:
    """Everything that determines how a transformers tokenizer tokenises a text, as one string, for a key.

    The roles of its special tokens (end, unknown and so on) are not included: see special_tokens.
    """
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.pop("truncation", None), state.pop("padding", None)
        if tokenizer.backend_tokenizer.encode_special_tokens:  # split_special_tokens; no part of to_str()
            state["encode_special_tokens"] = True
        return json.dumps(state, sort_keys=True)
    # SentencePiece models have scores that the vocabulary lacks; Marian has one model per language.
    models = [getattr(tokenizer, name, None) for name in ("sp_model", "spm_source", "spm_target")]
    scores = [None if m is None else hashlib.sha256(m.serialized_model_proto()).hexdigest() for m in models]
    made_with = {name: value for name, value in tokenizer.init_kwargs.items() if name not in _OF_NO_TOKEN}
    added = {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()}
    marks = [getattr(tokenizer, name, None) for name in ("prefix_tokens", "suffix_tokens")]  # of a language
    state = [sorted(tokenizer.get_vocab().items()), type(tokenizer).__name__, scores, made_with, added, marks]
    return json.dumps(state, sort_keys=True, default=str)


def special_tokens(tokenizer: Any) -> str:
    """The special tokens of a tokenizer, such as its eos_token, as one string, for a key."""
    return json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}, sort_keys=True)


def mapped(open_: Callable[[Any], np.ndarray]) -> np.ndarray:
    """The array that `open_` maps into memory in the numpy mode that it is given; it must not be written."""
    try:
        return open_("r")
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
    array = open_("c")  # file systems without shared mappings (FUSE's direct_io) allow private pages
    array.flags.writeable = False
    return array


def _mapped_npy(path: Path) -> np.ndarray:
    return mapped(lambda mode: np.load(path, mmap_mode=mode))


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """A lock held by one process of the node, which the system releases however the process ends.

    Yields whether this process got it without waiting; False if locks are not supported.
    """
    is_first = False
    with ExitStack() as stack:
        try:
            file = stack.enter_context(_open_lock(path))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_first = True
            except BlockingIOError:
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.debug("no file lock at %s: %s", path, error)
        yield is_first


def _open_lock(path: Path) -> Any:
    try:
        return path.open("a")
    except PermissionError:  # another user's file
        return path.open("rb")


def _load(entry: Path) -> dict[str, np.ndarray] | None:
    if not entry.is_dir():
        return None
    try:
        about = json.loads((entry / "about.json").read_text())
        arrays = {name: _mapped_npy(entry / f"{name}.npy") for name in about["arrays"]}
        if {name: list(array.shape) for name, array in arrays.items()} != about["arrays"]:
            raise ValueError("array sizes differ from about.json")
        return arrays
    except PermissionError as error:
        log.warning("token cache entry %s cannot be read (%s): tokenising without it", entry, error.strerror)
        return None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:  # EOFError: an empty file
        log.warning("token cache entry %s is damaged (%s): tokenising again", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _save(entry: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        work = entry.parent / f"{_work_name(entry)}{secrets.token_hex(8)}"
        work.mkdir()  # with default permissions, unlike mkdtemp's: a cache may be shared by users
        try:
            for name, array in arrays.items():
                with (work / f"{name}.npy").open("wb") as file:
                    _write_npy(file, array)
                    _sync(file)
            with (work / "about.json").open("w") as text:
                json.dump({"arrays": {name: list(array.shape) for name, array in arrays.items()}}, text)
                _sync(text)
            work.rename(entry)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:  # such as a full disk: the arrays are in memory
        if not entry.is_dir():  # otherwise another process or node was first
            log.warning("token cache entry %s was not written: %s", entry, error)


def _write_npy(file: Any, array: np.ndarray) -> None:
    """np.save with a clear error for a full disk, instead of "404087 requested and 76768 written"."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.view(np.uint8).data if array.size else b"")


def _work_name(entry: Path) -> str:
    return f".writing-{entry.name}-"


def _sync(file: Any) -> None:
    """Flush to disk before the entry gets its name, because only sizes are checked later."""
    file.flush()
    os.fsync(file.fileno())
