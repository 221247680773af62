"""The special tokens that a tokenizer puts around a text, found by tokenising a text with and without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens around one text: before + text + after; around two: before + first + between + second + after.

    between: None if they were looked up for a single text.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    between: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tokenizer: Any, pair: bool = False) -> SpecialTokens:
        """The special tokens of a transformers tokenizer, fast or slow; pair: around two texts.

        Raises:
            ValueError: they cannot be distinguished from the tokens of the text.
        """
        plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        whole = list((tokenizer("a", "a") if pair else tokenizer("a"))["input_ids"])
        starts = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
        if (whole and not plain) or len(starts) < (2 if pair else 1):
            raise ValueError(f"tokenizer: cannot tell its special tokens from the text in {whole} (of 'a')")
        first, last = starts[0], starts[-1]
        between = tuple(whole[first + len(plain) : last]) if pair else None
        return cls(tuple(whole[:first]), tuple(whole[last + len(plain) :]), between)

    def __len__(self) -> int:
        return len(self.before) + len(self.after) + len(self.between or ())
