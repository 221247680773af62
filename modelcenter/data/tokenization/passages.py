"""From questions and contexts to tokens: long contexts become overlapping windows, each after the whole question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from modelcenter.data.cache import cached, tokenizer_state
from modelcenter.data.tokenization.tokenize import Tokens, type_ids_for, unconfigured_backend

_CHUNK = 256  # pairs per call of the tokenizer
_VERSION = 1  # part of the cache's key: raise it when the way of tokenising changes


@dataclass(frozen=True)
class TokenizedPassages:
    """Questions with windows of their contexts.

    tokens: of the windows. owner: int64 (windows,), the question of each, ascending. inside: int32 (windows, 2), the
    range of the context's tokens in the window. chars: int32 (T, 2), the characters of the context in each token (0, 0
    outside it).
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


class _Sizes(NamedTuple):
    max_length: int
    doc_stride: int
    max_question_length: int


class _Window(NamedTuple):
    """A question with a part of its context: ids, type ids and characters of each token, and the context's range."""

    ids: np.ndarray
    type_ids: np.ndarray
    chars: np.ndarray
    context: tuple[int, int]


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
) -> TokenizedPassages:
    """Tokenise questions with their contexts, or read them from the cache.

    Args:
        max_length: tokens of a window, including the question and special tokens. doc_stride: tokens of the context
            that adjacent windows share. max_question_length: longer questions are truncated to this many tokens.

    Raises:
        ValueError: the tokenizer does not map tokens to characters; a context has no tokens; windows have no room for
            more than doc_stride tokens of context.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer: {type(tokenizer).__name__} does not map tokens to characters, which is needed to find answers "
            "in a text; use a fast tokenizer"
        )
    sizes = _Sizes(max_length, doc_stride, max_question_length)
    key = ["passages", _VERSION, *sizes, tokenizer_state(tokenizer), questions, contexts]
    arrays = cached(key, lambda: _tokenize(tokenizer, questions, contexts, sizes, where), cache=cache)
    tokens = Tokens(arrays["ids"], arrays["offsets"], type_ids_for(tokenizer, arrays), int(arrays["cut"][0]))
    return TokenizedPassages(tokens, arrays["owner"], arrays["inside"], arrays["chars"])


def _tokenize(
    tokenizer: Any, questions: Sequence[str], contexts: Sequence[str], sizes: _Sizes, where: Callable[[int], str]
) -> dict[str, np.ndarray]:
    windows: list[_Window] = []
    owner: list[int] = []
    cut = 0
    with unconfigured_backend(tokenizer) as backend:
        for start in range(0, len(questions), _CHUNK):
            pairs = list(zip(questions[start : start + _CHUNK], contexts[start : start + _CHUNK], strict=True))
            for i, encoding in enumerate(backend.encode_batch(pairs), start):
                side = np.array([-1 if s is None else s for s in encoding.sequence_ids])
                if not (side == 1).any():
                    raise ValueError(f"{where(i)}: the context has no token: {contexts[i]!r:.60}")
                cut += int((side == 0).sum()) > sizes.max_question_length
                of_question = _windows(encoding, side, sizes, partial(where, i))
                windows += of_question
                owner += [i] * len(of_question)
    type_ids = np.concatenate([window.type_ids for window in windows])
    arrays = {
        "ids": np.concatenate([window.ids for window in windows]),
        "offsets": np.concatenate(([0], np.cumsum([len(window.ids) for window in windows], dtype=np.int64))),
        "owner": np.array(owner, np.int64),
        "inside": np.array([window.context for window in windows], np.int32),
        "chars": np.concatenate([window.chars for window in windows]).astype(np.int32),
        "cut": np.array([cut]),
    }
    return {**arrays, "type_ids": type_ids} if type_ids.any() else arrays


def _windows(encoding: Any, side: np.ndarray, sizes: _Sizes, where: Callable[[], str]) -> list[_Window]:
    """The windows of one question; side: 0 for the question's tokens, 1 for the context's, -1 for special tokens."""
    question, context = np.nonzero(side == 0)[0], np.nonzero(side == 1)[0]
    # Everything before the context, without the excess of the question, and everything after the context.
    before = np.delete(np.arange(context[0]), question[sizes.max_question_length :])
    after = np.arange(context[-1] + 1, len(side))
    room = sizes.max_length - len(before) - len(after)
    if room <= sizes.doc_stride and room < len(context):
        raise ValueError(
            f"doc_stride: got {sizes.doc_stride}, but a max_length of {sizes.max_length} leaves {max(room, 0)} tokens "
            f"for the context after the question and special tokens ({where()}); raise max_length, or lower doc_stride "
            "or max_question_length"
        )
    ids, type_ids = np.array(encoding.ids, np.int32), np.array(encoding.type_ids, np.uint8)
    chars = np.array(encoding.offsets, np.int32).reshape(-1, 2) * (side == 1)[:, None]
    windows = []
    step = room - sizes.doc_stride if len(context) > room else room
    for begin in range(0, len(context), step):
        part = context[begin : begin + room]
        chosen = np.concatenate((before, part, after))
        bounds = len(before), len(before) + len(part)
        windows.append(_Window(ids[chosen], type_ids[chosen], chars[chosen], bounds))
        if begin + room >= len(context):
            break
    return windows


def find_answers(
    passages: TokenizedPassages, starts: Sequence[int], ends: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The first and last token of the answer in each window, int64 (windows,) each.

    Args:
        starts, ends: for each question the answer's first character and the one after its last in the context;
            start -1: there is no answer; start -2: there is one at an unknown position.

    Returns:
        Positions in the window: 0, its first token, if it does not contain the whole answer; the window's length, which
        losses ignore, if the position is unknown.
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
        # A part of an answer that extends beyond the window would be a wrong answer.
        if (chars[0, 0] <= start or opens[window]) and (chars[-1, 1] >= end or closes[window]):
            first[window], last[window] = passages.inside[window, 0] + touched[[0, -1]]
    return first, last
