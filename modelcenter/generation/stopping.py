"""Stop strings, which end a text besides its end token."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def stop_texts(strings: Any) -> list[str]:
    """The argument stop_strings as a list. Raises ValueError if one is not a string, or is empty."""
    if strings is None:
        return []
    several = isinstance(strings, Iterable) and not isinstance(strings, str)
    texts = list(strings) if several else [strings]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop_strings: got {strings!r}, expected a text or several of them, none of them empty")
    return texts


class StopStrings:
    """Checks whether the text of the newest tokens contains one of the strings."""

    def __init__(self, strings: str | Sequence[str] | None, tokenizer: Any):
        self.strings = stop_texts(strings)
        if self.strings and tokenizer is None:
            raise ValueError("stop_strings: got no tokenizer, which decodes the text to search; pass tokenizer= too")
        self.tokenizer = tokenizer
        # A token holds at least one byte, except some that hold none, for which there is a margin.
        self.reach = max((len(text.encode()) for text in self.strings), default=0) + 8

    def found(self, tokens: Tensor) -> list[bool]:
        """The result for each row of new tokens and the one before them (rows, 1 + n). Needs at least one string."""
        texts = self._new_texts(tokens[:, -self.reach - 1 :])
        # A text cut within a character may lack those after it, too: adjacent tokens of bytes are decoded together.
        cut = [row for row, text in enumerate(texts) if "\ufffd" in text]
        if cut and tokens.shape[1] > self.reach + 1:
            for row, text in zip(cut, self._new_texts(tokens[cut]), strict=True):
                texts[row] = text
        return [any(string in text for string in self.strings) for text in texts]

    def _new_texts(self, tokens: Tensor) -> list[str]:
        """The text that all but the first token of each row add: decoding them alone would drop a leading space."""
        decode = functools.partial(self.tokenizer.batch_decode, skip_special_tokens=False)
        parts = zip(decode(tokens), decode(tokens[:, :1]), decode(tokens[:, 1:]), strict=True)
        return [whole[len(first) :] if whole.startswith(first) else rest for whole, first, rest in parts]
