"""Printing text on a terminal while it is generated."""

import re
import sys
from typing import Any

import torch

# Endings that decoding may join to the word before, depending on the next token: "it '" and "s" become "it's".
_UNCERTAIN = re.compile(r"( n)?( '?)? ?\Z")
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
        self.shown = ""

    def put(self, tokens: torch.Tensor) -> None:
        new = tokens.flatten().tolist()
        skipped = min(self.skip, len(new))
        self.skip -= skipped
        self.tokens += new[skipped:]
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # an incomplete character
            self._show(_UNCERTAIN.sub("", text))
        if len(self.tokens) >= 2 * _CONTEXT:
            self._forget()

    def _forget(self) -> None:
        """Keep only the newest tokens, if decoding them alone gives the text that was printed for them."""
        newest = self.tokens[-_CONTEXT:]
        text = self.tokenizer.decode(newest, skip_special_tokens=True)
        if text and self.shown.endswith(text):
            self.tokens, self.shown = newest, text

    def end(self) -> None:
        self._show(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _show(self, text: str) -> None:
        sys.stdout.write(text[len(self.shown) :])
        sys.stdout.flush()
        self.shown = text
