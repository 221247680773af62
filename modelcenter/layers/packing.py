"""Packed: the shape of a batch without padding, built once per batch and handed to every layer.

Inside a model all tokens of a batch are one axis of length T. A padded batch is unpadded once at the embedding and
repadded once at the output; a packed batch arrives that way. Layers that need to know where a sequence ends ask Packed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.ops import Draws, draws_of
from modelcenter.layers.buckets import Bucket, bucket_cost, plan_buckets, plan_pairs
from modelcenter.layers.host_copies import host_copy, to_device
from modelcenter.layers.segments import Segments


@dataclass
class Piece:
    """Tokens of one rank under context parallelism: of whole sequences, or a part of one.

    Attributes:
        rows: (start, stop) among this rank's tokens. tokens: (start, stop) of their sequences among all tokens.
        sequences: (first, last + 1). first: place in its sequence of the first of a part.
        packed: of the whole sequences; None: a part of one sequence.
    """

    rows: tuple[int, int]
    tokens: tuple[int, int]
    sequences: tuple[int, int]
    first: int = 0
    packed: "Packed | None" = None


def spread(position_ids: Tensor, shape: tuple[int, int]) -> Tensor:
    """(batch * seq,) positions of the places of an input of shape (batch, seq), from those of all rows or of one.

    Raises:
        ValueError: they are of another shape.
    """
    try:
        return position_ids.expand(shape).reshape(-1)
    except RuntimeError as error:
        raise ValueError(
            f"position_ids: got shape {tuple(position_ids.shape)}, expected {shape} or {shape[1:]}: a position for "
            "each token"
        ) from error


@dataclass
class Packed:
    """Where each of n sequences lies among T tokens.

    Attributes:
        cu_seqlens: (n + 1,) int32, sequence i is tokens cu_seqlens[i] : cu_seqlens[i + 1].
        max_seqlen: length of the longest sequence, or more.
        positions: (T,) position of each token in its sequence (in a padded batch: its column).
        shape: (batch, seq) of the padded input, or (1, T) of a packed one.
        indices: (T,) place of each token in the flattened padded input; None when every place holds a token.
        packed: the caller passed cu_seqlens.
        split: under context parallelism, which tokens are this rank's (engine.parallel.context.TokenSplit). Tensors
            (T, ...) of the model, and `positions`, are then this rank's part; everything else here speaks of all
            tokens, with a dummy sequence at their end.
        dummy: the number of tokens of that sequence, 0 without it.
        rotary: (cos, sin) of each token, made once for all layers (layers.rotary). bias: relative position bias, as
            layers.mask.Mask has it, as are segments, segment_bias and rectangles. memory: (states, Packed) of the
            encoder, for cross-attention.
        cache: keys and values of earlier tokens (layers.cache.KVCache).
        inner: (T',) places among all tokens of those that the caller gave, where the model put some of its own before
            each sequence (`prefixed`), and own: the places of these; None: all are the caller's.
        draws: what dropouts draw from, where a training loop says which rows these are; None: torch's generator.
        read: (m,) numbers of the tokens whose states the unit that gets this is to work out (`reading`); None: all.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    shape: tuple[int, int]
    indices: Tensor | None = None
    packed: bool = False
    lengths: list[int] | None = None
    split: Any = None
    dummy: int = 0
    rotary: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None
    memory: "tuple[Tensor, Packed] | None" = None
    cache: Any = None
    segments: Segments | None = None
    segment_bias: Tensor | None = None
    rectangles: tuple[Tensor, ...] | None = None
    inner: Tensor | None = None
    own: Tensor | None = None
    draws: Draws | None = None
    read: Tensor | None = None
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, what a cache holds of it included."""
        return self.max_seqlen + (0 if self.cache is None else len(self.cache))

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, max_seqlen: int | None, tokens: int, position_ids: Tensor | None = None
    ) -> "Packed":
        """A batch that arrives packed, ids of shape (1, T)."""
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"cu_seqlens: got shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}, expected (sequences + 1,) of "
                "int32, starting at 0 and ending at the number of tokens"
            )
        lengths = None
        if (known := host_copy(cu_seqlens)).device.type == "cpu":  # on a GPU this check would wait for the device
            ends = known.tolist()
            lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
            if ends[0] != 0 or ends[-1] != tokens or min(lengths, default=0) < 0:
                raise ValueError(
                    f"cu_seqlens: got {ends[:3]}...{ends[-1]} for {tokens} tokens; expected rising offsets "
                    f"from 0 to {tokens}"
                )
            max_seqlen = max(lengths, default=0)
        elif max_seqlen is None:
            max_seqlen = int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if cu_seqlens.numel() > 1 else 0
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()  # as the kernels want it
        if position_ids is not None:
            positions = spread(position_ids, (1, tokens))
        else:
            seqlens = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
            starts = torch.repeat_interleave(cu_seqlens[:-1].long(), seqlens, output_size=tokens)
            positions = torch.arange(tokens, device=cu_seqlens.device) - starts
        return cls(cu_seqlens, int(max_seqlen), positions, (1, tokens), None, True, lengths)

    @classmethod
    def from_mask(
        cls,
        shape: tuple[int, int],
        attention_mask: Tensor | None,
        device: torch.device,
        position_ids: Tensor | None = None,
        count: bool = False,
    ) -> "Packed":
        """A padded batch, ids of shape (batch, seq); attention_mask (batch, seq) is 1 at tokens and 0 at padding.

        Positions are columns, or with `count` the number of tokens of the row before each.
        """
        batch, seq = shape
        if attention_mask is None:
            positions = torch.arange(seq, device=device).repeat(batch)
            if position_ids is not None:
                positions = spread(position_ids, shape)
            cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * seq
            return cls(cu, seq, positions, (batch, seq), None, False, [seq] * batch)
        if tuple(attention_mask.shape) != (batch, seq):
            raise ValueError(
                f"attention_mask: got shape {tuple(attention_mask.shape)}, expected {(batch, seq)}: 1 at tokens, 0 at "
                "padding. Lengths become a mask by torch.arange(seq) < lengths[:, None]; packed rows take cu_seqlens"
            )
        mask = attention_mask.bool()
        if attention_mask.dtype != torch.bool and attention_mask.device.type == "cpu":
            if not torch.equal(attention_mask, mask.to(attention_mask.dtype)):
                raise ValueError(
                    f"attention_mask: got values from {attention_mask.min().item()} to {attention_mask.max().item()}, "
                    "expected only 1 (token) and 0 (padding)"
                )
        seqlens = mask.sum(1, dtype=torch.int32)
        lengths: list[int] = seqlens.tolist()
        cu = torch.nn.functional.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        indices = None if sum(lengths) == batch * seq else mask.flatten().nonzero().flatten()
        if position_ids is not None:
            positions = spread(position_ids, shape)
            positions = positions if indices is None else positions[indices]
        elif count and indices is not None:
            starts = torch.repeat_interleave(cu[:-1], seqlens, output_size=indices.numel())
            positions = torch.arange(indices.numel(), device=device) - starts
        else:
            positions = (torch.arange(batch * seq, device=device) if indices is None else indices) % max(seq, 1)
        return cls(cu, max(lengths, default=0), positions, (batch, seq), indices, False, lengths)

    def prefixed(self, count: int, first: int = 0) -> "Packed":
        """The same with `count` tokens of the model's own before each sequence, at the positions from `first` on."""
        n, tokens, device = self.num_sequences, self.num_tokens, self.cu_seqlens.device
        seqlens = self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        number = torch.repeat_interleave(torch.arange(n, device=device), seqlens, output_size=tokens)
        inner = torch.arange(tokens, device=device) + (number + 1) * count
        place = torch.arange(count, device=device).repeat(n)
        positions = place.new_zeros(tokens + n * count).index_copy(0, inner, self.positions + count)
        before = (self.cu_seqlens[:-1] + torch.arange(n, device=device) * count).repeat_interleave(count) + place
        return replace(
            self,
            cu_seqlens=self.cu_seqlens + torch.arange(n + 1, dtype=torch.int32, device=device) * count,
            max_seqlen=self.max_seqlen + count if n else 0,
            positions=positions.index_copy(0, before, place + first),
            lengths=None if self.lengths is None else [length + count for length in self.lengths],
            inner=inner,
            own=before,
            _cache={},
        )

    def keyed(self) -> "Packed":
        """The same, with dropouts that draw by row and place, where a training loop says which rows these are."""
        return replace(self, draws=draws_of(self.cu_seqlens, self.num_tokens))

    def divided(self, split: Any) -> "Packed":
        """The same for one rank of several that share the tokens."""
        tokens = self.num_tokens
        dummy = split.padding(tokens)
        cu, lengths = self.cu_seqlens, self.lengths
        if dummy:
            cu = torch.cat([cu, cu[-1:] + dummy])
            lengths = None if lengths is None else [*lengths, dummy]
        positions = split.local(torch.nn.functional.pad(self.positions, (0, dummy)))
        draws = self.draws
        if draws is not None:
            all_tokens = torch.nn.functional.pad(draws.tokens, (0, dummy))
            mine = split.local(all_tokens)
            part = split.of_units(mine)
            draws = replace(draws, tokens=mine, parts={part.numel(): part}, every=all_tokens)
        longest = max(self.max_seqlen, dummy)
        return replace(
            self,
            cu_seqlens=cu,
            max_seqlen=longest,
            positions=positions,
            lengths=lengths,
            split=split,
            dummy=dummy,
            draws=draws,
            _cache={},
        )

    def reading(self, read: Tensor | None) -> "Packed":
        """The same for a unit of whose states only those of the tokens `read` (m,) are used, in rising order.

        It mixes all tokens as ever, goes on with these (`narrow`) and gives zeros for the others (`widen`).
        """
        if read is self.read:
            return self
        draws = self.draws
        if draws is not None and read is not None:
            draws = replace(draws, parts=draws.parts | {read.numel(): draws.tokens.index_select(0, read)})
        return replace(self, read=read, draws=draws)

    def narrow(self, x: Tensor) -> Tensor:
        """(T, ...) -> (m, ...), the tokens that are read."""
        return x if self.read is None else x.index_select(0, self.read)

    def widen(self, x: Tensor) -> Tensor:
        """(m, ...) of the tokens that are read -> (T, ...), zeros elsewhere."""
        if self.read is None:
            return x
        return x.new_zeros(self.num_tokens, *x.shape[1:]).index_copy(0, self.read, x)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once per batch."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    @property
    def as_given(self) -> bool:
        """Whether the tokens but the model's own are those of the input, in its order: no padding, no other ranks."""
        return self.indices is None and self.split is None and not self.dummy

    def among_all(self, places: Tensor) -> Tensor:
        """Numbers among all tokens of those with the numbers `places` (m,) among the input's, `as_given`."""
        return places if self.inner is None else self.inner.index_select(0, places)

    @property
    def num_tokens(self) -> int:
        """Tokens on this rank."""
        return self.positions.numel()

    @property
    def num_sequences(self) -> int:
        """Sequences of the batch."""
        return self.cu_seqlens.numel() - 1 - (self.dummy > 0)

    def host_lengths(self) -> list[int]:
        """Sequence lengths on the host (one device synchronisation per batch on a GPU, at most)."""
        if self.lengths is None:
            self.lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()
        return self.lengths

    def unpad(self, x: Tensor, fill: int = 0, prefix: Tensor | None = None, name: str = "a tensor") -> Tensor:
        """(batch, seq, ...) or (1, T, ...) -> (T, ...), with `fill` at dummy tokens and at those of the model's own.

        prefix: (count, ...) of the model's own before each sequence, in place of `fill`. name: what the caller calls x.

        Raises:
            ValueError: x is of another shape than the input.
        """
        if tuple(x.shape[:2]) != self.shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)} beside input of shape {self.shape}; they must agree")
        x = x.flatten(0, 1)
        x = x if self.indices is None else x.index_select(0, self.indices)
        if self.inner is not None:
            assert self.own is not None
            total = self.inner.numel() + self.own.numel()  # as the lengths say, which may be on a device alone
            whole = x.new_full((total, *x.shape[1:]), fill).index_copy(0, self.inner, x)
            if prefix is not None:
                rows = prefix.to(x.dtype).repeat(self.num_sequences, *([1] * (x.dim() - 1)))
                whole = whole.index_copy(0, self.own, rows)
            x = whole
        if self.dummy:
            x = torch.cat([x, x.new_full((self.dummy, *x.shape[1:]), fill)])
        return x if self.split is None else self.split.local(x)

    def whole(self, x: Tensor) -> Tensor:
        """(T, ...) of all tokens but the dummies, from this rank's."""
        if self.split is None:
            return x
        x = self.split.gather(x)
        return x[: x.shape[0] - self.dummy]

    def total(self, x: Tensor) -> Tensor:
        """A sum over all tokens, from the sum over this rank's."""
        return x if self.split is None else self.split.sum(x)

    def repad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(T, ...) -> (batch, seq, ...) with `fill` at padding, or (1, T, ...)."""
        x = self.whole(x)
        x = x if self.inner is None else x.index_select(0, self.inner)
        if self.indices is not None:
            full = x.new_full((self.shape[0] * self.shape[1], *x.shape[1:]), fill)
            x = full.index_copy(0, self.indices, x)
        return x.unflatten(0, self.shape)

    def sums(self, x: Tensor, places: Tensor) -> Tensor:
        """(n,): for each sequence the sum of x (m,), which is of this rank's tokens number `places` (m,)."""
        first = 0 if self.split is None else self.split.rank * self.num_tokens
        of = torch.searchsorted(
            self.cu_seqlens[1:].contiguous(), (places + first).to(self.cu_seqlens.dtype), right=True
        )
        return self.total(x.new_zeros(self.num_sequences).index_add(0, of, x))

    @property
    def count_own(self) -> int:
        """Tokens of the model's own before each sequence."""
        return 0 if self.own is None else self.own.numel() // max(self.num_sequences, 1)

    def by_sequence(self, x: Tensor, fill: float) -> Tensor:
        """(T,) -> (n, longest), the caller's tokens left-aligned, `fill` after each end; for a softmax over each
        sequence."""
        x = self.whole(x)
        x = x if self.inner is None else x.index_select(0, self.inner)
        if self.indices is None and not self.packed:
            return x.view(self.shape)
        n, longest = self.num_sequences, max(self.max_seqlen - self.count_own, 0)
        seqlens = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()[:n] - self.count_own
        inside = torch.arange(longest, device=x.device) < seqlens[:, None]
        return x.new_full((n, longest), fill).masked_scatter(inside, x)

    def first(self, x: Tensor) -> Tensor:
        """(T, ...) -> (n, ...), the rows of each sequence's first token, on every rank that shares the tokens.

        Raises:
            ValueError: a sequence has no token.
        """
        return self.at(x, self.first_tokens())

    def at(self, x: Tensor, index: Tensor) -> Tensor:
        """Rows of x (T, ...) by their number among all tokens, on every rank that shares the tokens."""
        if self.split is None:
            return x.index_select(0, index)
        index = index - self.split.rank * x.shape[0]
        own = (index >= 0) & (index < x.shape[0])
        rows = x.index_select(0, index.clamp(0, x.shape[0] - 1)).masked_fill(~own[:, None], 0.0)
        self.split.leave()
        return self.split.sum(rows)

    def first_tokens(self) -> Tensor:
        """(n,) token number of each sequence's first token.

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
        """(n,) token number of each sequence's last token. Raises ValueError as `first_tokens`."""
        self.first_tokens()
        return self.cu_seqlens[1 : self.num_sequences + 1].long() - 1

    def last_of(self, kept: Tensor) -> Tensor:
        """(n,) number among all tokens of each sequence's last token that is `kept`, -1 where it has none.

        kept: (batch, seq) or packed (1, T), bool; on the host only if the offsets are known there.
        """
        flat = kept.flatten() if self.indices is None else kept.flatten().index_select(0, self.indices)
        ends = host_copy(self.cu_seqlens)
        ends = (ends if ends.device == flat.device else self.cu_seqlens)[1 : self.num_sequences + 1].long()
        numbers = torch.arange(flat.numel(), device=flat.device) if self.inner is None else self.inner
        rows = torch.searchsorted(ends, numbers, right=True)
        return ends.new_full(ends.shape, -1).scatter_reduce(0, rows, numbers.masked_fill(~flat, -1), "amax")

    def own_pieces(self) -> list[Piece]:
        """This rank's tokens, in order: at most one cut sequence at each end, whole ones between them."""
        if "pieces" not in self._cache:
            low = self.split.rank * self.num_tokens
            high = low + self.num_tokens
            pieces: list[Piece] = []
            whole: list[int] = []
            begins = 0  # number of the first of them

            def close(stop: int) -> None:
                if whole:
                    start = stop - sum(whole)
                    cu = torch.tensor([0, *accumulate(whole)], dtype=torch.int32, device=self.cu_seqlens.device)
                    inner = Packed.from_cu_seqlens(
                        cu, max(whole), stop - start, self.positions[start - low : stop - low]
                    )
                    rows, numbers = (start - low, stop - low), (begins, begins + len(whole))
                    pieces.append(Piece(rows, (start, stop), numbers, 0, replace(inner, lengths=[*whole])))
                    whole.clear()

            ends = list(accumulate(self.host_lengths(), initial=0))
            for number, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
                if low <= start and stop <= high:
                    begins = begins if whole else number
                    whole.append(stop - start)
                elif start < high and stop > low:
                    close(start)
                    first = max(start, low)
                    rows = (first - low, min(stop, high) - low)
                    pieces.append(Piece(rows, (start, stop), (number, number + 1), first - start))
            close(high)
            self._cache["pieces"] = pieces
        return self._cache["pieces"]

    def some(self, first: int, last: int) -> Piece:
        """The sequences `first` to `last - 1` without the dummy, as if they were the batch."""
        lengths = self.host_lengths()[: self.num_sequences]
        start = sum(lengths[:first])
        lengths = lengths[first:last]
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.cu_seqlens.device)
        inner = Packed(cu, max(lengths, default=0), self.positions[:0], (1, sum(lengths)), None, True, lengths)
        return Piece((0, 0), (start, start + sum(lengths)), (first, first + len(lengths)), 0, inner)

    def with_memory(self, memory: "Packed") -> tuple[list[int], list[int]]:
        """The lengths of the sequences, and of those in `memory`.

        Raises:
            ValueError: a sequence has tokens and its one in `memory` has none.
        """
        n = min(self.num_sequences, memory.num_sequences)
        lengths, others = self.host_lengths()[:n], memory.host_lengths()[:n]
        if any(a and not b for a, b in zip(lengths, others, strict=True)):
            raise ValueError("a row of the batch has no token for the encoder; each needs at least one")
        return lengths, others

    def pairs(self, memory: "Packed | None" = None) -> list[tuple[Bucket, Bucket]]:
        """The rectangles of queries and keys in which attention runs; planned once per batch.

        Raises:
            ValueError: a sequence has tokens and its one in `memory` has none.
        """
        if memory is None:
            return [(bucket, bucket) for bucket in self.buckets()]
        key = f"pairs {id(memory)}"
        if key not in self._cache:
            groups = plan_pairs(*self.with_memory(memory), bucket_cost(self.cu_seqlens.device))
            self._cache[key] = [(self._bucket(rows), memory._bucket(rows)) for rows in groups]
        return self._cache[key]

    def buckets(self) -> list[Bucket]:
        """The rectangles in which attention runs where there is no variable-length kernel; planned once per batch."""

        def plan() -> list[Bucket]:
            groups = plan_buckets(self.host_lengths(), bucket_cost(self.cu_seqlens.device))
            return [self._bucket(rows) for rows in groups]

        return self.once("buckets", plan)

    def _bucket(self, rows: list[int]) -> Bucket:
        """The sequences of these numbers as one rectangle."""
        lengths = self.host_lengths()
        starts = self.once("starts", lambda: list(accumulate(lengths, initial=0)))
        device = self.cu_seqlens.device
        sizes = [lengths[i] for i in rows]
        n, length = len(rows), max(sizes)
        same = min(sizes) == length
        start = starts[rows[0]]
        if same and all(starts[row] - start == i * length for i, row in enumerate(rows)):
            return Bucket(n, length, start, start + n * length)
        # Worked out where the lengths are: a GPU is told, and not asked.
        first = torch.tensor([starts[i] for i in rows])[:, None]
        column = torch.arange(length)
        if same:
            return Bucket(n, length, -1, -1, to_device((first + column).flatten(), device))
        keep = column < torch.tensor(sizes)[:, None]
        index = torch.where(keep, first + column, first).flatten()
        tokens = keep.flatten().nonzero().flatten()
        return Bucket(n, length, -1, -1, *(to_device(x, device) for x in (index, keep, tokens, index[tokens])))
