"""Text on a terminal, as it is generated."""

import re
import sys
from typing import Any

import torch

# What decoding may join to the word before it, by what comes next: "it '" and "s" make "it's".
_UNCERTAIN = re.compile(r"( n)?( '?)? ?\Z")
_CONTEXT = 64  # tokens that newer ones are decoded with: decoding all of them each time would take quadratic time


class TerminalStreamer:
    """A streamer of model.generate that prints text as soon as it is certain: what the newest tokens decode to may
    still change.

    Args:
        skip: tokens to leave out, which are the prompt.
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
        if not text.endswith("\ufffd"):  # half a character
            self._show(_UNCERTAIN.sub("", text))
        if len(self.tokens) >= 2 * _CONTEXT:
            self._forget()

    def _forget(self) -> None:
        """Keep the newest tokens only, if what they decode to by themselves is what was shown of them."""
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
