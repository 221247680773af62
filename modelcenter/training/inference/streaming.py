"""Printing text on a terminal while it is generated."""

import re
import sys
from typing import Any

import torch

# Endings that decoding may join to the word before, depending on the next token: "it '" and "s", or "we 'v" and "e".
_UNCERTAIN = re.compile(r"( n)?( {0,2}'[vr]?)? {0,2}\Z")
# A token for one byte of a character (SentencePiece). If adjacent bytes are not UTF-8, each is decoded as U+FFFD: the
# text of all of them depends on the next one.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CONTEXT = 64  # tokens decoded together with new ones: decoding all of them each time would take quadratic time


class TerminalStreamer:
    """A streamer for model.generate that prints text as soon as it is final: later tokens may change how the newest
    ones are decoded.

    Args:
        skip: how many tokens to skip at the start, those of the prompt.
    """

    def __init__(self, tokenizer: Any, skip: int):
        self.tokenizer, self.skip = tokenizer, skip
        self.tokens: list[int] = []
        self._special = frozenset(tokenizer.all_special_ids)
        self.shown = ""

    def put(self, tokens: torch.Tensor) -> None:
        new = tokens.flatten().tolist()
        skipped = min(self.skip, len(new))
        self.skip -= skipped
        self.tokens += new[skipped:]
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd") and not self._ends_with_byte():  # else an incomplete character
            self._show(_UNCERTAIN.sub("", text))
        if len(self.tokens) >= 2 * _CONTEXT:
            self._forget(text)

    def _ends_with_byte(self) -> bool:
        """Whether the last token that is decoded is a byte: none of the special ones, or of those that are unknown."""
        decoded = (token for token in reversed(self.tokens) if token not in self._special)
        names = filter(None, map(self.tokenizer.convert_ids_to_tokens, decoded))
        return bool(_BYTE.fullmatch(next(names, "")))

    def _forget(self, text: str) -> None:
        """Keep only the newest tokens, if decoding them alone gives the end of `text`, that of all tokens, and what is
        not printed yet is in it."""
        newest = self.tokens[-_CONTEXT:]
        end = self.tokenizer.decode(newest, skip_special_tokens=True)
        waiting = len(text) - len(self.shown)
        if text.endswith(end) and waiting < len(end):
            self.tokens, self.shown = newest, end[: len(end) - waiting]

    def end(self) -> None:
        self._show(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _show(self, text: str) -> None:
        if len(text) <= len(self.shown):  # joining what is not printed yet made it shorter
            return
        sys.stdout.write(text[len(self.shown) :])
        sys.stdout.flush()
        self.shown = text
