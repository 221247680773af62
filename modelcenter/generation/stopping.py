"""Ends of a text beside its end token."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def stop_texts(strings: Any) -> list[str]:
    """The argument stop_strings as a list. Raises ValueError: other than texts, or an empty one."""
    texts = [strings] if isinstance(strings, str) else list(strings) if isinstance(strings, Iterable) else [strings]
    if strings is None:
        return []
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop_strings: got {strings!r}, expected a text or several of them, none of them empty")
    return texts


class StopStrings:
    """Whether the text of the newest tokens holds one of some strings."""

    def __init__(self, strings: str | Sequence[str] | None, tokenizer: Any):
        self.strings = stop_texts(strings)
        if self.strings and tokenizer is None:
            raise ValueError("stop_strings: needs tokenizer=, which turns tokens into the text they are looked for in")
        self.tokenizer = tokenizer
        # A token holds at least one byte, but for those that hold none: the margin is for these.
        self.reach = max((len(text.encode()) for text in self.strings), default=0) + 8

    def found(self, tokens: Tensor) -> list[bool]:
        """For each row of new tokens (rows, n)."""
        if not self.strings:
            return [False] * len(tokens)
        texts = self.tokenizer.batch_decode(tokens[:, -self.reach :], skip_special_tokens=False)
        return [any(text in decoded for text in self.strings) for decoded in texts]
