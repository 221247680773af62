"""What depends on the longest sequence of a batch, such as tables over distances, kept from one batch to the next."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

_Value = TypeVar("_Value")
_STEP = 64  # lengths are rounded up to a multiple of this, so that most batches find the value cached


class ByLength(Generic[_Value]):
    """A cache of one value, for sequences of up to n tokens."""

    def __init__(self) -> None:
        self._held: tuple[Hashable, _Value] | None = None

    def get(self, longest: int, key: Hashable, make: Callable[[int], _Value]) -> _Value:
        """make(n), with n at least `longest`; the cached value if n and `key` are those of the last call."""
        n = max(-(-longest // _STEP), 1) * _STEP
        held = self._held  # read once: other threads may replace it
        if held is None or held[0] != (n, key):
            with torch.inference_mode(False):  # a later forward may train
                held = self._held = (n, key), make(n)
        return held[1]
