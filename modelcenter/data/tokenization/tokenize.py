"""From texts to token ids: batched, stored as flat arrays, and cached on disk by content."""

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
from modelcenter.data.tokenization.languages import target_marks, writing_targets

_CHUNK = 16384  # rows per call of the tokenizer: enough to use all threads, little enough to hold as Python objects
_VERSION = 1  # part of the cache's key: raise it when the way of tokenising changes


@dataclass(frozen=True)
class Tokens:
    """The concatenated token ids of n rows.

    ids: int32 (T,); offsets: int64 (n+1,), row i is ids[offsets[i]:offsets[i+1]]; type_ids: uint8 (T,), or None if all
    are 0 or the model takes none.
    truncated: how many rows were truncated at max_length.
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
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_length: int,
    targets: bool = False,
    special_tokens: bool = True,
    cache: bool = True,
) -> Tokens:
    """Tokenise rows, or read them from the cache if the same texts were tokenised in the same way before.

    tokenizer: a transformers tokenizer; texts, pairs: n strings each; max_length: rows are truncated to it, including
    special tokens; targets: the texts are targets, and marked as such by a multilingual tokenizer; special_tokens:
    False: do not add the tokenizer's.
    Ranks of a node share the work: one tokenises, the others wait for its files. Raises ValueError if there are no
    rows.
    """
    if not len(texts):
        raise ValueError("there are no rows to tokenise")
    with writing_targets(tokenizer) if targets else nullcontext():
        key = ["rows", _VERSION, max_length, tokenizer.truncation_side, tokenizer_state(tokenizer), texts, pairs]
        key += ["targets"] if targets and not tokenizer.is_fast else []  # included in a fast one's state
        key += [] if special_tokens else ["no special tokens"]
        arrays = cached(
            key, lambda: _tokenize(tokenizer, texts, pairs, max_length, targets, special_tokens), cache=cache
        )
    return Tokens(arrays["ids"], arrays["offsets"], type_ids_for(tokenizer, arrays), int(arrays["truncated"][0]))


def concatenate_tokens(*parts: Tokens) -> Tokens:
    """The concatenated rows of all parts."""
    ends = np.cumsum([len(part.ids) for part in parts])
    offsets = [parts[0].offsets, *(part.offsets[1:] + end for part, end in zip(parts[1:], ends, strict=False))]
    types = None
    if any(part.type_ids is not None for part in parts):
        kinds = [np.zeros(len(p.ids), np.uint8) if p.type_ids is None else p.type_ids for p in parts]
        types = np.concatenate(kinds)
    ids = np.concatenate([part.ids for part in parts])
    return Tokens(ids, np.concatenate(offsets), types, sum(part.truncated for part in parts))


def type_ids_for(tokenizer: Any, arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The type ids among the arrays of tokenised rows, if models with this tokenizer take them; else None.

    The Rust part of every tokenizer numbers the two texts of a pair, even GPT-2's or Llama's.
    """
    return arrays.get("type_ids") if "token_type_ids" in tokenizer.model_input_names else None


def tokenize_targets(tokenizer: Any, texts: Sequence[str], *, max_length: int) -> Tokens:
    """Tokenise target texts, each with the end token, which some tokenizers do not add.

    Raises:
        ValueError: max_length leaves no room for a text.
    """
    special = max(tokenizer.num_special_tokens_to_add(), 1)
    if max_length <= special:
        raise ValueError(f"max_target_length: got {max_length}, expected more than the {special} special tokens")
    tokens, end = tokenize(tokenizer, texts, max_length=max_length, targets=True), tokenizer.eos_token_id
    if _ends_with(tokens, end).all() or target_marks(tokenizer)[1] != [end]:  # mBART's end token precedes the language
        return tokens
    tokens = tokenize(tokenizer, texts, max_length=max_length - 1, targets=True)
    lacking = ~_ends_with(tokens, end)
    offsets = np.concatenate(([0], np.cumsum(tokens.lengths + lacking)))
    return Tokens(np.insert(tokens.ids, tokens.offsets[1:][lacking], end), offsets, None, tokens.truncated)


def _ends_with(tokens: Tokens, end: int) -> np.ndarray:
    """Whether each row ends with a token, bool (n,)."""
    ended = np.zeros(len(tokens), dtype=bool)
    filled = tokens.lengths > 0
    ended[filled] = tokens.ids[tokens.offsets[1:][filled] - 1] == end
    return ended


def _tokenize(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
    targets: bool,
    special_tokens: bool,
) -> dict[str, np.ndarray]:
    if tokenizer.is_fast:
        encoder = _fast_encoder(tokenizer, max_length, special_tokens)
    else:
        encoder = _slow_encoder(tokenizer, max_length, targets, special_tokens)
    ids, types, lengths, truncated = [], [], [], 0
    read_types, special = True, tokenizer.num_special_tokens_to_add() if special_tokens else 0

    def chunks() -> Iterator[tuple[list[Any], bool]]:
        for start in range(0, len(texts), _CHUNK):
            chunk = list(texts[start : start + _CHUNK])
            yield chunk if pairs is None else list(zip(chunk, pairs[start : start + _CHUNK], strict=True)), read_types

    # One thread copies tokens into Python lists while the tokenizer, which releases the GIL, processes the next chunk.
    pool: Any = ThreadPoolExecutor(2) if tokenizer.is_fast else nullcontext()
    with encoder as encode, pool as executor:
        for rows in ordered_map(lambda chunk: encode(*chunk), chunks(), executor, 2):
            lengths += [len(row[0]) for row in rows]
            ids.append(_flat(rows, np.int32))
            types.append(_flat(rows, np.uint8, types=True) if read_types else np.zeros(len(ids[-1]), np.uint8))
            truncated += sum(row[2] for row in rows)
            # The types of a single text depend only on the tokenizer's template: once they are 0, they are not read.
            read_types = pairs is not None or bool(types[-1].any()) or int(ids[-1].size) <= special * len(rows)
    type_ids = np.concatenate(types)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    arrays = {"ids": np.concatenate(ids), "offsets": offsets, "truncated": np.array([truncated])}
    return {**arrays, "type_ids": type_ids} if type_ids.any() else arrays


def _flat(rows: _Rows, dtype: Any, types: bool = False) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(row[1] if types else row[0] for row in rows), dtype)


_Rows = list[tuple[Sequence[int], Sequence[int], bool]]  # ids, type ids, whether the row was cut


@contextmanager
def unconfigured_backend(tokenizer: Any) -> Iterator[Any]:
    """The Rust part of a fast tokenizer without truncation and padding, which are restored afterwards, because they are
    saved with the tokenizer."""
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation(), backend.no_padding()
    try:
        yield backend
    finally:
        backend.no_truncation()
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


@contextmanager
def _fast_encoder(
    tokenizer: Any, max_length: int, special_tokens: bool
) -> Iterator[Callable[[list[Any], bool], _Rows]]:
    """The Rust part itself: its transformers wrapper spends a third of the time on building dictionaries."""
    with unconfigured_backend(tokenizer) as backend:
        backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
        # Reading an encoding copies it into Python lists, so types are read only on request.
        yield lambda batch, read_types: [
            (e.ids, e.type_ids if read_types else (), bool(e.overflowing))
            for e in backend.encode_batch_fast(batch, add_special_tokens=special_tokens)
        ]


@contextmanager
def _slow_encoder(
    tokenizer: Any, max_length: int, targets: bool, special_tokens: bool
) -> Iterator[Callable[[list[Any], bool], _Rows]]:
    options = {"return_token_type_ids": True, "add_special_tokens": special_tokens}
    names = ("text_target", "text_pair_target") if targets else ("text", "text_pair")

    def encode(batch: list[Any], read_types: bool) -> _Rows:
        rows: _Rows = []
        for item in batch:
            given = dict(zip(names, item if isinstance(item, tuple) else (item,), strict=False))
            full = tokenizer(**given, **options)
            cut = tokenizer(**given, truncation=True, max_length=max_length, **options)
            rows.append((cut["input_ids"], cut["token_type_ids"], len(full["input_ids"]) > max_length))
        return rows

    yield encode
