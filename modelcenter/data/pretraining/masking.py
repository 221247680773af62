"""Masks for masked language modelling: which tokens are to be predicted, and what replaces them.

As in BERT (Devlin et al. 2019, arXiv:1810.04805): of the chosen tokens, 80 % become the mask token, 10 % a random token
and 10 % stay. Whole words are masked together (for Chinese: Cui et al. 2021, arXiv:1906.08101).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from modelcenter.data.characters import belongs_to_word

IGNORED = -100
MASKED, REPLACED = 0.8, 0.1  # of the chosen tokens; the others stay
Words = Literal["none", "words", "rjieba"]
_CJK = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7AF), (0xF900, 0xFAFF), (0x20000, 0x3134F))


class Masking:
    """Chooses tokens and masks them.

    fraction: share of a sequence's tokens that is chosen, exact on average; at least one token. Special tokens are
    never chosen, unknown tokens only if there are no others.
    words: "words": all tokens of a word or none, where each Chinese, Japanese or Korean character is a word. "rjieba":
    the same, with Chinese words found by rjieba. "none": token by token.
    masked, replaced: shares of the chosen tokens that become the mask token or a random token; the rest stay.

    Raises:
        ValueError: the tokenizer has no mask token, or its tokens are bytes, which rjieba cannot read.
    """

    def __init__(
        self,
        tokenizer: Any,
        fraction: float = 0.15,
        words: Words = "none",
        masked: float = MASKED,
        replaced: float = REPLACED,
    ):
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "tokenizer: it has no mask token, which masked language modelling needs; use one that has, such as "
                "BERT's"
            )
        if not 0 < fraction < 1:
            raise ValueError(f"mask_fraction: got {fraction}, expected a fraction between 0 and 1")
        self.fraction, self.mask_id = fraction, int(tokenizer.mask_token_id)
        self.masked, self.replaced = masked, replaced
        count = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        self.excluded = np.zeros(count, bool)  # by token id
        self.excluded[list(tokenizer.all_special_ids)] = True
        self.replacements = np.flatnonzero(~self.excluded)
        self.unknown = tokenizer.unk_token_id
        self.words = None if words == "none" else WordStarts(tokenizer, segment=words == "rjieba")

    def apply(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(the masked input, the labels: the original tokens at masked places and -100 elsewhere), both int64 (n,).

        Raises:
            ValueError: a token is not in the tokenizer's vocabulary.
        """
        if len(ids) and int(ids.max()) >= len(self.excluded):
            raise ValueError(
                f"tokens: got {int(ids.max())}, but the tokenizer has {len(self.excluded)} tokens; use the one that "
                "made the token file"
            )
        chosen = self.choose(ids, random)
        labels = np.full(len(ids), IGNORED, np.int64)
        labels[chosen] = ids[chosen]
        inputs = ids.astype(np.int64)
        draw = random.random(len(chosen))
        inputs[chosen[draw < self.masked]] = self.mask_id
        others = chosen[(draw >= self.masked) & (draw < self.masked + self.replaced)]
        inputs[others] = random.choice(self.replacements, len(others))
        return inputs, labels

    def choose(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """The indices of the tokens to predict; empty only if all tokens are special."""
        allowed = ~self.excluded[ids]
        if not allowed.any() and self.unknown is not None:
            allowed = ids == self.unknown
        places = np.flatnonzero(allowed)
        if not len(places):
            return places
        if self.words is None:
            word = np.arange(len(places))
        else:
            word = np.unique(np.cumsum(self.words(ids))[places], return_inverse=True)[1]
        sizes = np.bincount(word)
        order = random.permutation(len(sizes))
        ends = np.cumsum(sizes[order])
        # Words are taken as long as they fit. The word at the limit is taken with the probability that makes the
        # average exact.
        target = self.fraction * len(places)
        whole = int(np.searchsorted(ends, target, side="right"))
        if whole < len(ends):
            whole += bool(random.random() * sizes[order[whole]] < target - (ends[whole - 1] if whole else 0))
        return places[np.isin(word, order[: max(whole, 1)])]


class WordStarts:
    """Finds the tokens at which words start, by the tokenizer's marks.

    WordPiece marks tokens that continue a word with ##. SentencePiece and byte-level tokenizers mark spaces, so a token
    without a mark continues a word, except for punctuation and characters that are words. Without any marks each token
    is a word.
    """

    def __init__(self, tokenizer: Any, segment: bool = False):
        count = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        tokens = ["" if token is None else token for token in tokenizer.convert_ids_to_tokens(list(range(count)))]
        special = set(tokenizer.all_special_ids)
        spaced = {mark: sum(token.startswith(mark) for token in tokens) for mark in ("Ġ", "▁", "##")}
        mark = max(spaced, key=lambda name: spaced[name]) if any(spaced.values()) else None
        self.marks_inside = mark == "##"  # marks are on tokens that continue a word, not on those that begin one
        self.has_marks = mark is not None
        bytelike = mark == "Ġ"
        if segment and bytelike:
            raise ValueError(
                "word_segmenter: rjieba reads characters, but the tokens of this tokenizer are bytes; use none"
            )
        self.texts: list[str] = []
        self.is_marked, self.continues, self.is_word = (np.zeros(count, bool) for _ in range(3))
        to_byte = _bytes_of_characters() if bytelike else {}
        for i, token in enumerate(tokens):
            text = token.removeprefix(mark) if mark is not None and i not in special else token
            self.is_marked[i] = i not in special and text != token
            if bytelike and i not in special:
                raw = bytes(to_byte.get(c, 0x3F) for c in text)
                self.continues[i] = bool(raw) and 0x80 <= raw[0] < 0xC0  # within a character
                text = raw.decode("utf-8", "ignore") or ("\u4e00" if raw and 0xE3 <= raw[0] <= 0xED else text)
            elif self.marks_inside:
                self.continues[i] = self.is_marked[i]
            self.texts.append("\ufffc" if i in special else text)
            # A space by itself begins the word that follows it.
            self.is_word[i] = i in special or (bool(text) and (not any(map(belongs_to_word, text)) or _is_cjk(text[0])))
        self.cut: Any = None
        if segment:
            try:
                import rjieba
            except ImportError:
                raise ValueError("word_segmenter: rjieba is not installed: pip install rjieba") from None
            self.cut = rjieba.cut

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """bool (n,): whether a word starts at each token of a sequence."""
        if not len(ids):
            return np.zeros(0, bool)
        if self.cut is not None:
            starts = self._segmented(ids)
        elif self.marks_inside:
            starts = ~self.continues[ids]
        elif not self.has_marks:
            starts = np.ones(len(ids), bool)
        else:
            is_word = self.is_word[ids]
            starts = (self.is_marked[ids] | is_word | np.concatenate(([True], is_word[:-1]))) & ~self.continues[ids]
        starts[0] = True
        return starts

    def _segmented(self, ids: np.ndarray) -> np.ndarray:
        text, at, before = "", [], ""
        for token in ids.tolist():
            piece = self.texts[token]
            spaced = not self.continues[token] if self.marks_inside else self.is_marked[token]
            if spaced and before and piece and not (_is_cjk(before[-1]) and _is_cjk(piece[0])):
                text += " "
            at.append(len(text))
            text, before = text + piece, piece or before
        ends = np.cumsum([0, *map(len, self.cut(text))])
        return np.isin(at, ends) & ~(self.continues[ids] if self.marks_inside else np.zeros(len(ids), bool))


def _is_cjk(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _CJK)


def _bytes_of_characters() -> dict[str, int]:
    """{character of a byte-level token: the byte it represents}. Printable bytes are represented by themselves, the
    others, in order, by the characters from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in shown]
    return table | {chr(256 + i): byte for i, byte in enumerate(hidden)}
