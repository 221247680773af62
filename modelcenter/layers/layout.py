"""The positions of a batch's tokens in the caller's input: unpadding and padding tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def check_tensor(name: str, value: Any, expected: str = "a tensor") -> None:
    """Raise ValueError for a list, an array or a tokenizer's batch instead of a tensor."""
    if not isinstance(value, Tensor):
        hint = "; pass the parts of a batch by name: **batch" if isinstance(value, Mapping) else ""
        raise ValueError(f"{name}: got {type(value).__name__}, expected {expected}{hint}")


@dataclass(frozen=True)
class InputLayout:
    """The positions of a batch's tokens in its input.

    Attributes:
        shape: (batch, seq) of a padded input, or (1, T) of a packed one.
        indices: (T,) index of each of the caller's tokens in the flattened padded input; None: there is no padding.
        packed: the caller passed cu_seqlens.
        caller_tokens: (T',) indices of the caller's tokens among all, if the model puts tokens of its own before each
            sequence; None: all are the caller's.
        prefix_tokens: (n * prefix_length,) indices of the model's own tokens; None: it has none.
        prefix_length: the number of the model's own tokens before each sequence.
    """

    shape: tuple[int, int]
    indices: Tensor | None = None
    packed: bool = False
    caller_tokens: Tensor | None = None
    prefix_tokens: Tensor | None = None
    prefix_length: int = 0

    def unpad(self, x: Tensor, fill: int = 0, prefix: Tensor | None = None, name: str = "a tensor") -> Tensor:
        """(batch, seq, ...) or (1, T, ...) -> (T, ...), with `fill` at the model's own tokens.

        prefix: (prefix_length, ...) for the model's own tokens, instead of `fill`. name: the caller's name of x.

        Raises:
            ValueError: x does not have the shape of the input.
        """
        if tuple(x.shape[:2]) != self.shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)} beside input of shape {self.shape}; they must agree")
        x = x.flatten(0, 1)
        x = x if self.indices is None else x.index_select(0, self.indices)
        if self.caller_tokens is None:
            return x
        assert self.prefix_tokens is not None
        total = self.caller_tokens.numel() + self.prefix_tokens.numel()
        tokens = x.new_full((total, *x.shape[1:]), fill).index_copy(0, self.caller_tokens, x)
        if prefix is not None:
            times = self.prefix_tokens.numel() // prefix.shape[0]
            rows = prefix.to(x.dtype).repeat(times, *([1] * (x.dim() - 1)))
            tokens = tokens.index_copy(0, self.prefix_tokens, rows)
        return tokens

    def repad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(T, ...) -> (batch, seq, ...) with `fill` at padding, or (1, T, ...); without the model's own tokens."""
        x = self.of_caller(x)
        if self.indices is not None:
            padded = x.new_full((self.shape[0] * self.shape[1], *x.shape[1:]), fill)
            x = padded.index_copy(0, self.indices, x)
        return x.unflatten(0, self.shape)

    def of_caller(self, x: Tensor) -> Tensor:
        """(T, ...) -> (T', ...), the rows of the caller's tokens."""
        return x if self.caller_tokens is None else x.index_select(0, self.caller_tokens)

    def token_indices(self, places: Tensor) -> Tensor:
        """Convert indices `places` (m,) among the caller's tokens to indices (m,) among all tokens."""
        return places if self.caller_tokens is None else self.caller_tokens.index_select(0, places)


def flat_positions(position_ids: Tensor, shape: tuple[int, int], prefix: str = "") -> Tensor:
    """(batch * seq,) positions for an input of shape (batch, seq), given for all rows or for one.

    Raises:
        ValueError: they have another shape; the message names `{prefix}position_ids`.
    """
    try:
        return position_ids.expand(shape).reshape(-1)
    except RuntimeError as error:
        raise ValueError(
            f"{prefix}position_ids: got shape {tuple(position_ids.shape)}, expected {shape} or {shape[1:]}: a position "
            "for each token"
        ) from error
