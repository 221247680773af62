"""Sequences that lie one after the other on one axis of tokens, and how attention groups them."""

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
    """Tokens of one rank under context parallelism that follow each other: of whole sequences, or a part of one.

    Attributes:
        rows: (start, stop) among the rank's tokens.
        tokens: (start, stop) of their sequences among all tokens.
        numbers: (first, last + 1) of their sequences.
        first: of a part, the place of its first token in the sequence.
        whole: the whole sequences; None: a part of one sequence.
    """

    rows: tuple[int, int]
    tokens: tuple[int, int]
    numbers: tuple[int, int]
    first: int = 0
    whole: "Sequences | None" = None


class Sequences:
    """n sequences, one after the other.

    Not a dataclass: fully_shard would copy it for each unit in 16 bits, and each unit would work out `derived` anew.

    Attributes:
        cu_seqlens: (n + 1,) int32, sequence i is tokens cu_seqlens[i] : cu_seqlens[i + 1].
        max_seqlen: length of the longest sequence, or more.
        lengths: of each sequence, where the host knows them; `host_lengths` asks the device if need be.
        dummy: tokens of one more sequence behind the others, by which the tokens divide among ranks; 0: there is none.
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
        """Without the dummy."""
        return self.cu_seqlens.numel() - 1 - (self.dummy > 0)

    def host_lengths(self) -> list[int]:
        """Lengths on the host, the dummy's too (one device synchronisation on a GPU, at most)."""
        if self.lengths is None:
            self.lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()
        return self.lengths

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` works out from these sequences alone; made once, for all layers that ask with this key."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def starts(self) -> list[int]:
        """The index of the first token of each sequence, and at the end the number of all tokens."""
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

    # -- the rectangles in which attention runs where there is no kernel for sequences of any length -------------------

    def buckets(self) -> list[Bucket]:
        """Rectangles of sequences of similar length."""

        def plan() -> list[Bucket]:
            device = self.cu_seqlens.device
            groups = plan_buckets(self.host_lengths(), bucket_cost(device), length_multiple(device))
            return [self._bucket(numbers) for numbers in groups]

        return self.derived("buckets", plan)

    def bucket_pairs(self, memory: "Sequences | None" = None) -> list[tuple[Bucket, Bucket]]:
        """Rectangles of queries and of keys, which are those of the same sequences, or of the ones in `memory`.

        Raises:
            ValueError: a sequence has tokens and its one in `memory` has none.
        """
        if memory is None:
            return [(bucket, bucket) for bucket in self.buckets()]

        def plan() -> list[tuple[Bucket, Bucket]]:
            device = self.cu_seqlens.device
            groups = plan_pairs(*self.paired_lengths(memory), bucket_cost(device), length_multiple(device))
            return [(self._bucket(numbers), memory._bucket(numbers)) for numbers in groups]

        return self.derived(("pairs", memory), plan)

    def places(self, memory: "Sequences | None" = None) -> tuple[Places, Places]:
        """Where the tokens, and the keys, stand in the rectangles of `bucket_pairs`, of which there is at least one."""

        def find() -> tuple[Places, Places]:
            pairs, device = self.bucket_pairs(memory), self.cu_seqlens.device
            of_queries = make_places([queries for queries, _ in pairs], self.starts()[-1], device)
            if memory is None:
                return of_queries, of_queries
            return of_queries, make_places([keys for _, keys in pairs], memory.starts()[-1], device)

        return self.derived(("places", memory), find)

    def paired_lengths(self, memory: "Sequences") -> tuple[list[int], list[int]]:
        """The lengths of the sequences, and those of the sequences with the same indices in `memory`.

        Raises:
            ValueError: a sequence has tokens and its one in `memory` has none.
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
        """The sequences `first` to `last - 1` as if they were all."""
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
