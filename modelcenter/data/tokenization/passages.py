"""Questions and their contexts to tokens: long contexts become windows that overlap, each behind the whole question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelcenter.data.cache import cached, tokenizer_state
from modelcenter.data.tokenization.tokenize import Tokens, types_in

_CHUNK = 256  # pairs per call of the tokenizer
_VERSION = 1  # part of the cache's key: raise it when the way of tokenising changes


@dataclass(frozen=True)
class Passages:
    """Questions with windows of their contexts.

    tokens: of the windows. owner: int64 (windows,), the question of each, ascending. inside: int32 (windows, 2), where
    the context's tokens begin and end in the window. chars: int32 (T, 2), the characters of the context that a token
    stands for (0, 0 outside it).
    """

    tokens: Tokens
    owner: np.ndarray
    inside: np.ndarray
    chars: np.ndarray

    def __len__(self) -> int:
        return len(self.owner)

    def chars_of(self, window: int) -> np.ndarray:
        """int32 (n, 2): the characters of the context's tokens in a window."""
        begin, (first, end) = self.tokens.offsets[window], self.inside[window]
        return self.chars[begin + first : begin + end]


def tokenize_passages(
    tokenizer: Any,
    questions: Sequence[str],
    contexts: Sequence[str],
    *,
    max_length: int,
    doc_stride: int,
    max_question_length: int,
    where: Callable[[int], str],
    cache: bool = True,
) -> Passages:
    """Tokenise questions with their contexts, or read them from the cache.

    Args:
        max_length: tokens of a window, the question and special tokens included. doc_stride: tokens of the context that
            neighbouring windows share. max_question_length: longer questions are cut to so many tokens.

    Raises:
        ValueError: a tokenizer that does not know which characters its tokens stand for; a context without tokens;
            windows without room for more than doc_stride tokens of context.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer: {type(tokenizer).__name__} does not say which characters its tokens stand for; answers "
            "in a text need a fast tokenizer"
        )
    sizes = [max_length, doc_stride, max_question_length]
    key = ["passages", _VERSION, *sizes, tokenizer_state(tokenizer), questions, contexts]
    found = cached(key, lambda: _tokenize(tokenizer, questions, contexts, *sizes, where), cache=cache)
    tokens = Tokens(found["ids"], found["offsets"], types_in(found, tokenizer), int(found["cut"][0]))
    return Passages(tokens, found["owner"], found["inside"], found["chars"])


def _tokenize(
    tokenizer: Any,
    questions: Sequence[str],
    contexts: Sequence[str],
    max_length: int,
    doc_stride: int,
    max_question: int,
    where: Callable[[int], str],
) -> dict[str, np.ndarray]:
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation(), backend.no_padding()
    ids: list[np.ndarray] = []
    types: list[np.ndarray] = []
    chars: list[np.ndarray] = []
    owner: list[int] = []
    inside: list[tuple[int, int]] = []
    cut = 0
    try:
        for start in range(0, len(questions), _CHUNK):
            pairs = list(zip(questions[start : start + _CHUNK], contexts[start : start + _CHUNK], strict=True))
            for i, encoding in enumerate(backend.encode_batch(pairs), start):
                side = np.array([-1 if s is None else s for s in encoding.sequence_ids])
                asked, there = np.nonzero(side == 0)[0], np.nonzero(side == 1)[0]
                if not len(there):
                    raise ValueError(f"{where(i)}: the context has no token: {contexts[i]!r:.60}")
                # Everything before the context but what is too long of the question; the context; what is behind it.
                before = np.delete(np.arange(there[0]), asked[max_question:])
                behind = np.arange(there[-1] + 1, len(side))
                cut += len(asked) > max_question
                room = max_length - len(before) - len(behind)
                if room <= 0 or (room <= doc_stride and room < len(there)):
                    raise ValueError(
                        f"doc_stride: got {doc_stride}, but a max_length of {max_length} leaves {max(room, 0)} tokens "
                        f"for the context beside the question and special tokens ({where(i)}); raise max_length, or "
                        "lower doc_stride or max_question_length"
                    )
                every, kinds = np.array(encoding.ids, np.int32), np.array(encoding.type_ids, np.uint8)
                spans = np.array(encoding.offsets, np.int32).reshape(-1, 2) * (side == 1)[:, None]
                for begin in range(
                    0, max(len(there) - doc_stride, 1), room - doc_stride if len(there) > room else room
                ):
                    part = there[begin : begin + room]
                    chosen = np.concatenate((before, part, behind))
                    ids.append(every[chosen]), types.append(kinds[chosen]), chars.append(spans[chosen])
                    owner.append(i), inside.append((len(before), len(before) + len(part)))
                    if begin + room >= len(there):
                        break
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
    kinds = np.concatenate(types)
    arrays = {
        "ids": np.concatenate(ids),
        "offsets": np.concatenate(([0], np.cumsum([len(window) for window in ids], dtype=np.int64))),
        "owner": np.array(owner, np.int64),
        "inside": np.array(inside, np.int32),
        "chars": np.concatenate(chars).astype(np.int32),
        "cut": np.array([cut]),
    }
    return {**arrays, "type_ids": kinds} if kinds.any() else arrays


def find_answers(passages: Passages, starts: Sequence[int], ends: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Where the answer is in each window: its first and last token, int64 (windows,) each.

    Args:
        starts, ends: for each question the answer's first character and the one after its last in the context;
            start -1: there is no answer; start -2: there is one, nobody knows where.

    Returns:
        Places in the window: 0, the window's first token, where it does not hold the whole answer; the window's length,
        which no loss counts, where nobody knows.
    """
    first, last = np.zeros(len(passages), np.int64), np.zeros(len(passages), np.int64)
    owner, lengths = passages.owner, passages.tokens.lengths
    opens = np.concatenate(([True], owner[1:] != owner[:-1]))  # the first window of its question
    closes = np.concatenate((opens[1:], [True]))
    for window, question in enumerate(owner.tolist()):
        start, end = starts[question], ends[question]
        if start == -2:
            first[window] = last[window] = lengths[window]
        if start < 0:
            continue
        chars = passages.chars_of(window)
        touched = np.nonzero((chars[:, 1] > start) & (chars[:, 0] < end))[0]
        if not len(touched):
            continue
        # A part of an answer that begins before the window or goes on behind it would be a wrong answer.
        begins = touched[0] > 0 or chars[0, 0] <= start or opens[window]
        ends_here = touched[-1] < len(chars) - 1 or chars[-1, 1] >= end or closes[window]
        if begins and ends_here:
            first[window], last[window] = passages.inside[window, 0] + touched[[0, -1]]
    return first, last
