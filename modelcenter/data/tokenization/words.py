"""From words with tags to tokens: each word is tokenised by itself, and rows that are too long become several
windows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelcenter.data.cache import cached, tokenizer_state
from modelcenter.data.tokenization.special_tokens import SpecialTokens
from modelcenter.data.tokenization.tokenize import Tokens

_VERSION = 1  # part of the cache's key: raise it when the way of tokenising changes


@dataclass(frozen=True)
class TokenizedWords:
    """Rows of words as windows of tokens.

    tokens: of the windows. owner: int64 (windows,), the row of each, ascending; rows without words have no window.
    word: int64 (T,), the number of each token's word, counted over all rows; -1 for special tokens. first: bool (T,),
    whether a token is the first of its word.
    """

    tokens: Tokens
    owner: np.ndarray
    word: np.ndarray
    first: np.ndarray


def tokenize_words(
    tokenizer: Any, rows: Sequence[Sequence[str]], *, max_length: int, split: bool = True, cache: bool = True
) -> TokenizedWords:
    """Tokenise rows of words, or read them from the cache.

    A word is tokenised as it would be between spaces, whatever its neighbours, like is_split_into_words of
    transformers, with fast and slow tokenizers. A word without any token becomes the unknown token; a word with more
    tokens than a window is truncated.

    Args:
        max_length: tokens of a window, including special tokens. split: longer rows become several windows of whole
            words; otherwise they are truncated after the last whole word that fits.

    Raises:
        ValueError: there are no words, or a word has no tokens and the tokenizer no unknown token.
    """
    flat = [word for row in rows for word in row]
    if not flat:
        raise ValueError("there are no words to tokenise")
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    about = [max_length, split, prefix_space(tokenizer), tokenizer.unk_token_id]
    key = ["words", _VERSION, *about, tokenizer_state(tokenizer), counts, flat]
    arrays = cached(key, lambda: _tokenize(tokenizer, flat, counts, max_length, split), cache=cache)
    tokens = Tokens(arrays["ids"], arrays["offsets"], None, int(arrays["cut"][0]))
    return TokenizedWords(tokens, arrays["owner"], arrays["word"], arrays["first"])


def prefix_space(tokenizer: Any) -> str:
    """The prefix of each word: a space for byte-level tokenizers, in which a space belongs to the word after it."""
    if not tokenizer.is_fast:
        return ""
    before = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    return " " if any(step["type"] == "ByteLevel" and not step["add_prefix_space"] for step in steps if step) else ""


def space_before_words(tokenizer: Any) -> None:
    """Make a byte-level tokenizer put a space before a text, as before any other word (RoBERTa's and GPT-2's
    add_prefix_space), and save this setting, so that later users of the model tokenise words as in training."""
    if prefix_space(tokenizer) and hasattr(tokenizer.backend_tokenizer.pre_tokenizer, "add_prefix_space"):
        tokenizer.backend_tokenizer.pre_tokenizer.add_prefix_space = True
        tokenizer.add_prefix_space = tokenizer.init_kwargs["add_prefix_space"] = True


def _tokenize(
    tokenizer: Any, flat: list[str], counts: np.ndarray, max_length: int, split: bool
) -> dict[str, np.ndarray]:
    special = SpecialTokens.of(tokenizer)
    before, after = special.before, special.after
    room = max_length - len(special)
    # Each distinct word is tokenised once: `distinct` maps each word to its number, `table` has the tokens of all.
    numbers: dict[str, int] = {}
    distinct = np.fromiter((numbers.setdefault(word, len(numbers)) for word in flat), np.int64, len(flat))
    pieces = [ids[:room] for ids in _pieces(tokenizer, list(numbers))]
    table = np.concatenate([np.asarray(ids, np.int32) for ids in pieces])
    table_sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
    table_starts = np.cumsum(table_sizes) - table_sizes

    row = np.repeat(np.arange(len(counts)), counts)
    window, cut = _windows(table_sizes[distinct], counts, room, split)
    kept = np.nonzero(window >= 0)[0]
    distinct, window = distinct[kept], window[kept]
    sizes = table_sizes[distinct]
    starts = np.cumsum(sizes) - sizes
    place_in_word = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)  # of each token
    tokens = table[np.repeat(table_starts[distinct], sizes) + place_in_word]
    token_window = np.repeat(window, sizes)

    windows = int(window[-1]) + 1
    lengths = np.bincount(token_window, minlength=windows) + len(special)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    place = np.arange(len(tokens)) + (token_window + 1) * len(before) + token_window * len(after)
    ids = np.empty(int(offsets[-1]), np.int32)
    for i, token in enumerate(before):
        ids[offsets[:-1] + i] = token
    for i, token in enumerate(after):
        ids[offsets[1:] - len(after) + i] = token
    word, first = np.full(len(ids), -1, np.int64), np.zeros(len(ids), bool)
    ids[place], word[place], first[place] = tokens, np.repeat(kept, sizes), place_in_word == 0
    owner = row[kept][np.searchsorted(window, np.arange(windows))]
    return {"ids": ids, "offsets": offsets, "owner": owner, "word": word, "first": first, "cut": np.array([cut])}


def _windows(sizes: np.ndarray, counts: np.ndarray, room: int, split: bool) -> tuple[np.ndarray, int]:
    """(the window of each word, -1 if it is left out; the number of truncated rows).

    sizes: tokens of each word; counts: words of each row; room: tokens of a window.
    """
    window_starts, is_lost = np.zeros(len(sizes), bool), np.zeros(len(sizes), bool)
    cut = 0
    ends = np.cumsum(counts)
    begins = ends - counts
    filled = np.concatenate(([0], np.cumsum(sizes)))  # tokens before each word
    window_starts[begins[counts > 0]] = True
    for row in np.nonzero(filled[ends] - filled[begins] > room)[0]:
        at, end = int(begins[row]), int(ends[row])
        while filled[end] - filled[at] > room:
            at = int(np.searchsorted(filled, filled[at] + room, side="right")) - 1
            if not split:
                is_lost[at:end], cut = True, cut + 1
                break
            window_starts[at] = True
    window = np.cumsum(window_starts) - 1
    window[is_lost] = -1
    return window, cut


def _pieces(tokenizer: Any, words: list[str]) -> list[list[int]]:
    """The tokens of each word, at least one."""
    space = prefix_space(tokenizer)
    pieces = tokenizer([space + word for word in words], add_special_tokens=False)["input_ids"]
    unknown = tokenizer.unk_token_id
    if unknown is None and not all(pieces):
        empty = next(word for word, ids in zip(words, pieces, strict=True) if not ids)
        raise ValueError(f"the word {empty!r} has no token, and the tokenizer has no token for unknown words")
    return [list(ids) or [unknown] for ids in pieces]
