"""Span corruption: T5's objective (Raffel et al. 2019, arXiv:1910.10683, section 3.1.4), as published.

Each span of a sequence is replaced by its own sentinel; the target is each sentinel followed by what it replaces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_NAMES = ("<extra_id_{}>", "▁<extra_id_{}>", "<s_{}>")  # T5, mT5 (as a SentencePiece token), CPM-2


def sentinels_of(tokenizer: Any) -> np.ndarray:
    """The tokenizer's sentinels, int64, in the order of use.

    Raises:
        ValueError: there are none.
    """
    vocabulary = tokenizer.get_vocab()
    for name in _NAMES:
        sentinels: list[int] = []
        while (token := vocabulary.get(name.format(len(sentinels)))) is not None:
            sentinels.append(token)
        if sentinels:
            return np.array(sentinels, np.int64)
    raise ValueError(
        f"tokenizer: it has no sentinels ({_NAMES[0].format(0)} and so on), which replace spans in span corruption; "
        "use a tokenizer of T5's family, or add them with add_special_tokens"
    )


class SpanCorruption:
    """Corrupts sequences of tokens.

    density: the fraction of tokens that are noise. span: the mean length of a span. eos: the token after inputs and
    targets; None: none. max_length: maximum tokens of the inputs; `room` is the number of text tokens that fit in.

    Raises:
        ValueError: density or span is out of range, or there are too few sentinels for max_length.
    """

    def __init__(
        self, sentinels: np.ndarray, max_length: int, eos: int | None, density: float = 0.15, span: float = 3.0
    ):
        if not 0 < density < 1:
            raise ValueError(f"noise_density: got {density}, expected a fraction between 0 and 1")
        if not span >= 1:
            raise ValueError(f"mean_span: got {span}, expected at least 1 token")
        self.sentinels, self.eos, self.density, self.span = sentinels, eos, density, span
        self.room = self._room(max_length)
        spans = int(self.counts(np.array([self.room]))[1][0])
        if spans > len(sentinels):
            raise ValueError(
                f"max_length: rows of {max_length} tokens have {spans} spans, but the tokenizer has {len(sentinels)} "
                "sentinels; lower max_length or noise_density, or raise mean_span"
            )

    def _room(self, max_length: int) -> int:
        """The largest number of text tokens whose corrupted form has at most max_length."""
        if int(self.lengths(np.array([2]))[0][0]) > max_length:
            raise ValueError(f"max_length: got {max_length}, too few tokens for a span and its sentinel; give more")
        sizes = np.arange(2, int((max_length + 2) / (1 - self.density)) + 3)  # the last has too many
        return int(sizes[np.argmax(self.lengths(sizes)[0] > max_length) - 1])

    def counts(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(noise tokens, spans) of sequences of these lengths, each at least 2."""
        noise = np.clip(np.rint(sizes * self.density), 1, sizes - 1).astype(np.int64)
        spans = np.maximum(np.rint(noise / self.span), 1).astype(np.int64)
        return noise, np.minimum(spans, np.minimum(noise, sizes - noise))

    def lengths(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens of the inputs, of the targets) for sequences of these lengths; 0 for lengths below 2."""
        sizes = np.asarray(sizes, np.int64)
        noise, spans = self.counts(np.maximum(sizes, 2))
        end = 0 if self.eos is None else 1
        inputs, targets = (np.where(sizes < 2, 0, n + spans + end) for n in (sizes - noise, noise))
        return inputs, targets

    def apply(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), both int64, of at least 2 tokens; sequences start with text and end with noise."""
        noise, spans = (int(n[0]) for n in self.counts(np.array([len(ids)])))
        hidden, kept = _segments(noise, spans, random), _segments(len(ids) - noise, spans, random)
        bounds = np.cumsum(np.stack((kept, hidden), 1).ravel())
        pieces = np.split(ids.astype(np.int64), bounds[:-1])
        marks = self.sentinels[:spans, None]
        end = [] if self.eos is None else [np.array([self.eos], np.int64)]
        inputs = [part for i in range(spans) for part in (pieces[2 * i], marks[i])]
        targets = [part for i in range(spans) for part in (marks[i], pieces[2 * i + 1])]
        return np.concatenate(inputs + end), np.concatenate(targets + end)


def _segments(total: int, parts: int, random: np.random.Generator) -> np.ndarray:
    """The sizes of `parts` non-empty segments that add up to `total`; every partition is equally likely."""
    cuts = np.sort(random.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], cuts, [total])))
