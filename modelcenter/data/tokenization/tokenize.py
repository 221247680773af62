"""Texts to token ids, once: batched, kept as flat arrays and cached on disk by the content they came from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelcenter.data.cache import cached, tokenizer_state
from modelcenter.data.parallel import ordered_map

_CHUNK = 16384  # rows per call of the tokenizer: enough to use all threads, little enough to hold as Python objects
_VERSION = 1  # part of the cache's key: raise it when the way of tokenising changes


@dataclass(frozen=True)
class Tokens:
    """Token ids of n rows, end to end.

    ids: int32 (T,); offsets: int64 (n+1,), row i is ids[offsets[i]:offsets[i+1]]; type_ids: uint8 (T,), or None if all
    are 0 or the model is to be given none.
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
    key = ["rows", _VERSION, max_length, tokenizer.truncation_side, tokenizer_state(tokenizer), texts, pairs]
    arrays = cached(key, lambda: _tokenize(tokenizer, texts, pairs, max_length), cache=cache)
    return Tokens(arrays["ids"], arrays["offsets"], types_in(arrays, tokenizer), int(arrays["truncated"][0]))


def types_in(arrays: Mapping[str, np.ndarray], tokenizer: Any) -> np.ndarray | None:
    """The type ids of tokenised rows where the tokenizer is one that gives a model types: the Rust part of all of them
    numbers the two texts of a pair, those of GPT-2 or Llama too."""
    return arrays.get("type_ids") if "token_type_ids" in tokenizer.model_input_names else None


def tokenize_ended(tokenizer: Any, texts: Sequence[str], *, max_length: int) -> Tokens:
    """Tokens of texts that a model shall write, each with the token that ends it, which some tokenizers do not add.

    Raises:
        ValueError: max_length leaves no room for a text.
    """
    special = max(tokenizer.num_special_tokens_to_add(), 1)
    if max_length <= special:
        raise ValueError(f"max_target_length: got {max_length}, expected more than the {special} special tokens")
    tokens, end = tokenize(tokenizer, texts, max_length=max_length), tokenizer.eos_token_id
    if _ended(tokens, end).all():
        return tokens
    tokens = tokenize(tokenizer, texts, max_length=max_length - 1)
    lacking = ~_ended(tokens, end)
    offsets = np.concatenate(([0], np.cumsum(tokens.lengths + lacking)))
    return Tokens(np.insert(tokens.ids, tokens.offsets[1:][lacking], end), offsets, None, tokens.truncated)


def _ended(tokens: Tokens, end: int) -> np.ndarray:
    """Which rows end with a token."""
    found = np.zeros(len(tokens), dtype=bool)
    some = tokens.lengths > 0
    found[some] = tokens.ids[tokens.offsets[1:][some] - 1] == end
    return found


def _tokenize(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> dict[str, np.ndarray]:
    encode = _fast(tokenizer, max_length) if tokenizer.is_fast else _slow(tokenizer, max_length)
    ids, types, lengths, truncated = [], [], [], 0
    typed, special = True, tokenizer.num_special_tokens_to_add()

    def chunks() -> Iterator[tuple[list[Any], bool]]:
        for start in range(0, len(texts), _CHUNK):
            chunk = list(texts[start : start + _CHUNK])
            yield chunk if pairs is None else list(zip(chunk, pairs[start : start + _CHUNK], strict=True)), typed

    # One thread copies tokens into Python lists while the tokenizer, which needs no Python, is at the next chunk.
    pool: Any = ThreadPoolExecutor(2) if tokenizer.is_fast else nullcontext()
    with encode as run, pool as executor:
        for rows in ordered_map(lambda chunk: run(*chunk), chunks(), executor, 2):
            lengths += [len(row[0]) for row in rows]
            ids.append(_flat(rows, np.int32))
            types.append(_flat(rows, np.uint8, types=True) if typed else np.zeros(len(ids[-1]), np.uint8))
            truncated += sum(row[2] for row in rows)
            # The types of a single text are those of the tokenizer's template: seen once to be 0, they are not read.
            typed = pairs is not None or bool(types[-1].any()) or int(ids[-1].size) <= special * len(rows)
    type_ids = np.concatenate(types)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    arrays = {"ids": np.concatenate(ids), "offsets": offsets, "truncated": np.array([truncated])}
    return {**arrays, "type_ids": type_ids} if type_ids.any() else arrays


def _flat(rows: _Rows, dtype: Any, types: bool = False) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(row[1] if types else row[0] for row in rows), dtype)


_Rows = list[tuple[Sequence[int], Sequence[int], bool]]  # ids, type ids, whether the row was cut


@contextmanager
def _fast(tokenizer: Any, max_length: int) -> Iterator[Callable[[list[Any], bool], _Rows]]:
    """The Rust tokenizer itself: its transformers wrapper spends a third of the time on building dictionaries."""
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding  # restored, or they would be saved with the tokenizer
    backend.no_padding()
    backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    try:
        # What of an encoding is read is copied into Python lists, so types only when they are asked for.
        yield lambda batch, typed: [
            (e.ids, e.type_ids if typed else (), bool(e.overflowing)) for e in backend.encode_batch_fast(batch)
        ]
    finally:
        backend.no_truncation()
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


@contextmanager
def _slow(tokenizer: Any, max_length: int) -> Iterator[Callable[[list[Any], bool], _Rows]]:
    def run(batch: list[Any], typed: bool) -> _Rows:
        rows: _Rows = []
        for item in batch:
            first, second = item if isinstance(item, tuple) else (item, None)
            full = tokenizer(first, second, return_token_type_ids=True)
            cut = tokenizer(first, second, truncation=True, max_length=max_length, return_token_type_ids=True)
            rows.append((cut["input_ids"], cut["token_type_ids"], len(full["input_ids"]) > max_length))
        return rows

    yield run
