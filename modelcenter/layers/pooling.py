"""Pooling the hidden states of each sequence into one vector, after Pooling of sentence-transformers."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from modelcenter.layers.host_copies import host_copy
from modelcenter.layers.packing import Packed


class Pooling:
    """Pools hidden states x (T, width) of a batch to (n, width), one row per sequence.

    If ranks share the tokens, each passes its own part of x, and all get the whole result.

    Args:
        left_out: (n,) integers: how many tokens at the start of each sequence (a prompt) are not pooled; None: none.
            The others keep the weights that they have in the whole sequence.

    Raises:
        ValueError: left_out has another shape or dtype, or, if it is known on the host, leaves a sequence empty.
    """

    def __init__(self, ctx: Packed, left_out: Tensor | None = None):
        self._ctx = ctx
        self._left_out = None if left_out is None else _checked(left_out, ctx).long()

    def by(self, name: str, x: Tensor) -> Tensor:
        """Pool by one of embedding_settings.POOLINGS. Raises ValueError if a sequence has no token."""
        if name == "max":
            return self._greatest(x)
        if (tokens := self.tokens(name)) is not None:
            return self._ctx.select(x, tokens)
        if name == "mean" and self._left_out is None:
            return self._ctx.mean_by_sequence(x)
        first, last = self._first(), self._ctx.last_tokens()
        wide = x if x.dtype == torch.float64 else x.float()
        count = (last - first + 1).to(wide.dtype)
        if name == "weighted_mean":
            start = self._ctx.first_tokens()
            weights = (self._places + 1).to(wide.dtype)
            # The sum of the weights from first - start + 1 to last - start + 1.
            divisor = (first - start + 1 + last - start + 1) * count / 2
        else:
            weights = torch.ones_like(self._places, dtype=wide.dtype)
            divisor = count if name == "mean" else count.sqrt()
        if self._takes_part is not None:
            weights = weights * self._takes_part
        sums = self._ctx.sum_by_sequence(wide * weights[:, None])
        return (sums / divisor[:, None]).to(x.dtype)

    def tokens(self, name: str) -> Tensor | None:
        """(n,) index, among all tokens, of each sequence's only pooled token; None: several are pooled."""
        match name:
            case "cls":
                return self._first()
            case "last":
                return self._ctx.last_tokens()
        return None

    def _greatest(self, x: Tensor) -> Tensor:
        ctx = self._ctx
        n, width = ctx.num_sequences, x.shape[1]
        ctx.first_tokens()  # raises if a sequence has no token
        taken = x if self._takes_part is None else x.masked_fill(~self._takes_part[:, None], -torch.inf)
        number = self._numbers[:, None].expand_as(x)
        # The additional row is for the tokens of the dummy sequence.
        found = x.new_full((n + 1, width), -torch.inf).scatter_reduce(0, number, taken, "amax")[:n]
        return ctx.greatest_over_ranks(found)  # because the tokens of a sequence may be on several

    def _first(self) -> Tensor:
        """(n,) index of the first pooled token of each sequence."""
        first = self._ctx.first_tokens()
        return first if self._left_out is None else first + self._left_out

    @cached_property
    def _numbers(self) -> Tensor:
        """(T,) sequence number of each of this rank's tokens; n for those of the dummy sequence."""
        return self._ctx.sequence_of()

    @cached_property
    def _own(self) -> Tensor:
        return torch.arange(self._ctx.num_tokens, device=self._ctx.positions.device)

    @cached_property
    def _places(self) -> Tensor:
        """(T,) index of each of this rank's tokens in its sequence, from 0, whatever its position id is."""
        return self._own + self._ctx.first_own_token - self._ctx.cu_seqlens[self._numbers]

    @cached_property
    def _takes_part(self) -> Tensor | None:
        """(T,) whether each of this rank's tokens is pooled; None: all are."""
        if self._left_out is None:
            return None
        return self._places >= F.pad(self._left_out, (0, 1))[self._numbers]


def _checked(left_out: Tensor, ctx: Packed) -> Tensor:
    """left_out, once it is checked to leave each sequence a token. Raises ValueError as Pooling."""
    n = ctx.num_sequences
    if tuple(left_out.shape) != (n,) or left_out.is_floating_point() or left_out.dtype == torch.bool:
        raise ValueError(
            f"prompt_lengths: got shape {tuple(left_out.shape)} of {left_out.dtype}, expected ({n},) whole numbers, "
            "the tokens of each row's prompt"
        )
    known = host_copy(left_out)
    if known.device.type == "cpu":  # on a GPU the check would synchronise
        for row, (count, length) in enumerate(zip(known.tolist(), ctx.sequences.host_lengths(), strict=False)):
            if not 0 <= count < max(length, 1):
                raise ValueError(
                    f"prompt_lengths: row {row} has {count} for a text of {length} tokens, expected 0 to {length - 1}, "
                    "so that some are left to be pooled"
                )
    return left_out
