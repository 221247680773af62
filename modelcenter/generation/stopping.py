"""Ends of a text beside its end token."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class StopStrings:
    """Whether the text of the newest tokens holds one of some strings."""

    def __init__(self, strings: str | Sequence[str] | None, tokenizer: Any):
        self.strings = [strings] if isinstance(strings, str) else list(strings or ())
        if self.strings and tokenizer is None:
            raise ValueError("stop_strings: needs tokenizer=, which turns tokens into the text they are looked for in")
        if not all(self.strings):
            raise ValueError("stop_strings: got an empty string; leave it out")
        self.tokenizer = tokenizer
        # A token holds at least one byte, but for those that hold none: the margin is for these.
        self.reach = max((len(text.encode()) for text in self.strings), default=0) + 8

    def found(self, tokens: Tensor) -> list[bool]:
        """For each row of new tokens (rows, n)."""
        if not self.strings:
            return [False] * len(tokens)
        texts = self.tokenizer.batch_decode(tokens[:, -self.reach :], skip_special_tokens=False)
        return [any(text in decoded for text in self.strings) for decoded in texts]
