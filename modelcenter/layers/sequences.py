"""Sequences that are concatenated along one axis of tokens, and how attention groups them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from modelcenter.layers.buckets import (
    Bucket,
    Places,
    bucket_cost,
    length_multiple,
    make_bucket,
    make_places,
    plan_buckets,
    plan_pairs,
)


@dataclass
class Piece:
    """Consecutive tokens of one rank under context parallelism: whole sequences, or a part of one sequence.

    Attributes:
        rows: (start, stop) among the rank's tokens.
        tokens: (start, stop) of their sequences among all tokens.
        numbers: (first, last + 1) of their sequences.
        first: for a part, the position of its first token in the sequence.
        whole: the whole sequences; None: a part of one sequence.
    """

    rows: tuple[int, int]
    tokens: tuple[int, int]
    numbers: tuple[int, int]
    first: int = 0
    whole: "Sequences | None" = None


class Sequences:
    """n concatenated sequences.

    Not a dataclass: fully_shard would copy it for each unit in 16 bits, and each unit would compute `derived` again.

    Attributes:
        cu_seqlens: (n + 1,) int32; sequence i has the tokens cu_seqlens[i] : cu_seqlens[i + 1].
        max_seqlen: the length of the longest sequence, or an upper bound.
        lengths: of each sequence, if known on the host; `host_lengths` reads the device if needed.
        dummy: tokens of an additional last sequence, which make the tokens divisible among ranks; 0: there is none.
    """

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, lengths: list[int] | None = None, dummy: int = 0):
        self.cu_seqlens, self.max_seqlen, self.lengths, self.dummy = cu_seqlens, max_seqlen, lengths, dummy
        self._derived: dict[Hashable, Any] = {}

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device) -> "Sequences":
        """Sequences of these lengths."""
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(cu_seqlens, max(lengths, default=0), lengths)

    @property
    def num_sequences(self) -> int:
        """The number of sequences, without the dummy."""
        return self.cu_seqlens.numel() - 1 - (self.dummy > 0)

    def host_lengths(self) -> list[int]:
        """The lengths on the host, including the dummy's (at most one synchronisation with a GPU)."""
        if self.lengths is None:
            self.lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()
        return self.lengths

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make`, which depends on these sequences only; computed once for all layers that use `key`."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def starts(self) -> list[int]:
        """The index of the first token of each sequence, followed by the number of all tokens."""
        return self.derived("starts", lambda: list(accumulate(self.host_lengths(), initial=0)))

    def first_tokens(self) -> Tensor:
        """(n,) index of each sequence's first token.

        Raises:
            ValueError: a sequence has no token.
        """
        if 0 in self.host_lengths():
            raise ValueError(
                f"row {self.host_lengths().index(0)} of the batch has no token (attention_mask is 0 everywhere); "
                "a pooled head needs at least one token in each row"
            )
        return self.cu_seqlens[: self.num_sequences].long()

    def last_tokens(self) -> Tensor:
        """(n,) index of each sequence's last token. Raises ValueError as `first_tokens`."""
        self.first_tokens()
        return self.cu_seqlens[1 : self.num_sequences + 1].long() - 1

    # -- rectangles, for attention kernels that do not take packed sequences -------------------------------------------

    def buckets(self) -> list[Bucket]:
        """Rectangles of sequences of similar length."""

        def plan() -> list[Bucket]:
            device = self.cu_seqlens.device
            groups = plan_buckets(self.host_lengths(), bucket_cost(device), length_multiple(device))
            return [self._bucket(numbers) for numbers in groups]

        return self.derived("buckets", plan)

    def bucket_pairs(self, memory: "Sequences | None" = None) -> list[tuple[Bucket, Bucket]]:
        """Rectangles of queries and of keys; the keys are of the same sequences, or of those in `memory`.

        Raises:
            ValueError: a sequence has tokens, but its counterpart in `memory` is empty.
        """
        if memory is None:
            return [(bucket, bucket) for bucket in self.buckets()]

        def plan() -> list[tuple[Bucket, Bucket]]:
            device = self.cu_seqlens.device
            groups = plan_pairs(*self.paired_lengths(memory), bucket_cost(device), length_multiple(device))
            return [(self._bucket(numbers), memory._bucket(numbers)) for numbers in groups]

        return self.derived(("pairs", memory), plan)

    def places(self, memory: "Sequences | None" = None) -> tuple[Places, Places]:
        """The slots of the tokens, and of the keys, in the rectangles of `bucket_pairs`, which must not be empty."""

        def find() -> tuple[Places, Places]:
            pairs, device = self.bucket_pairs(memory), self.cu_seqlens.device
            of_queries = make_places([queries for queries, _ in pairs], self.starts()[-1], device)
            if memory is None:
                return of_queries, of_queries
            return of_queries, make_places([keys for _, keys in pairs], memory.starts()[-1], device)

        return self.derived(("places", memory), find)

    def paired_lengths(self, memory: "Sequences") -> tuple[list[int], list[int]]:
        """The lengths of the sequences, and of those with the same indices in `memory`.

        Raises:
            ValueError: a sequence has tokens, but its counterpart in `memory` is empty.
        """
        n = min(self.num_sequences, memory.num_sequences)
        lengths, of_memory = self.host_lengths()[:n], memory.host_lengths()[:n]
        if any(a and not b for a, b in zip(lengths, of_memory, strict=True)):
            raise ValueError("a row of the batch has no token for the encoder; each needs at least one")
        return lengths, of_memory

    def _bucket(self, numbers: list[int]) -> Bucket:
        return make_bucket(numbers, self.host_lengths(), self.starts(), self.cu_seqlens.device)

    # -- parts of the sequences, under context parallelism -------------------------------------------------------------

    def part(self, first: int, last: int) -> "Sequences":
        """The sequences `first` to `last - 1`, as if there were no others."""
        lengths = self.host_lengths()[first:last]
        return self.derived(("part", first, last), lambda: Sequences.of_lengths(lengths, self.cu_seqlens.device))

    def pieces(self, low: int, high: int) -> list[Piece]:
        """The tokens `low` to `high - 1` in order: at most one cut sequence at each end, whole ones between them."""

        def cut() -> list[Piece]:
            pieces: list[Piece] = []
            whole: list[int] = []
            starts = self.starts()
            for number, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
                if low <= start and stop <= high:
                    whole.append(number)
                elif start < high and stop > low:
                    first = max(start, low)
                    rows = first - low, min(stop, high) - low
                    pieces.append(Piece(rows, (start, stop), (number, number + 1), first - start))
            if whole:
                numbers = whole[0], whole[-1] + 1
                start, stop = (starts[number] for number in numbers)
                rows = start - low, stop - low
                pieces.append(Piece(rows, (start, stop), numbers, 0, self.part(*numbers)))
            return sorted(pieces, key=lambda piece: piece.rows)

        return self.derived(("pieces", low, high), cut)
