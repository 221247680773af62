"""Packed: the description of a batch without padding, made once per forward and passed to every layer.

Inside a model, all tokens of a batch are one axis of length T. A padded batch is unpadded once, at the embedding, and
repadded once, at the output; a packed batch arrives without padding. layers.sequences says where sequences begin and
end, layers.layout where their tokens are in the caller's input.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.ops import Draws, draws_of
from modelcenter.layers.host_copies import host_copy, to_device
from modelcenter.layers.layout import InputLayout, flat_positions
from modelcenter.layers.segments import Segments
from modelcenter.layers.sequences import Sequences


def in_rows(x: Tensor, lengths: Tensor, longest: int, fill: float) -> Tensor:
    """(sum of lengths,) numbers -> (n, longest), each row's next to one another, and behind them `fill`.

    Args:
        lengths: (n,) of each row, 64-bit. longest: of these, as the host knows it.
    """
    places = torch.arange(longest, device=x.device)
    at = (lengths.cumsum(0) - lengths)[:, None] + places
    at = torch.where(places < lengths[:, None], at, x.shape[0])
    # Not by masked_scatter: its gradient is as long as the mask has it, for which a GPU is waited for.
    return torch.cat([x, x.new_full((1,), fill)]).index_select(0, at.flatten()).view(at.shape)


@dataclass
class Packed:
    """A batch of n sequences with T tokens, and what the layers of a model share in one forward.

    Attributes:
        sequences: where each sequence begins and ends.
        layout: where the tokens are in the caller's input.
        positions: (T,) position of each token in its sequence (in a padded batch: its column).
        split: under context parallelism, which tokens are this rank's (engine.parallel.context.TokenSplit). The model's
            tensors (T, ...) and `positions` are then this rank's part, while `sequences` and `layout` describe all
            tokens. If the ranks cannot share these equally, `sequences` ends with a dummy sequence.
        draws: the source of dropout masks if the training loop has named the rows; None: torch's generator.
        cache: keys and values of earlier tokens (layers.cache.KVCache).
        memory: (states, sequences) of the encoder, for cross-attention. memory_draws: `draws` of its tokens.
        rotary: (cos, sin) of each token, shared by all layers (layers.rotary). local_rotary: those of layers with a
            window, if they differ.
        distances: the embeddings of the distances between tokens (layers.disentangled.DistanceStates).
        bias, segments, segment_bias, rectangles: as in layers.mask.Mask.
        output_tokens: (m,) indices of the tokens whose states the next unit has to compute (`with_outputs`); None: all.
        branch_scale: factor of the branches that a unit adds to its hidden states, applied before their last product.
        labelled: the labels, and the indices of the tokens that have one, cached for the vocabulary's head.
        globals: the tokens with global attention (layers.global_tokens.GlobalTokens); None: there are none.
        attended: (k,) indices of the tokens that others attend to, and which sequences they make up; None: all.
        balance: collects how the tokens use experts (layers.experts.Balance); None: the loss does not depend on it.
    """

    sequences: Sequences
    layout: InputLayout
    positions: Tensor
    split: Any = None
    draws: Draws | None = None
    cache: Any = None
    memory: tuple[Tensor, Sequences] | None = None
    memory_draws: Draws | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    local_rotary: tuple[Tensor, Tensor] | None = None
    distances: Any = None
    bias: Tensor | None = None
    segments: Segments | None = None
    segment_bias: Tensor | None = None
    rectangles: tuple[Tensor, ...] | None = None
    output_tokens: Tensor | None = None
    branch_scale: float = 1.0
    labelled: tuple[Tensor, Tensor] | None = None
    globals: Any = None
    attended: tuple[Tensor, Sequences] | None = None
    balance: Any = None

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor,
        max_seqlen: int | None,
        tokens: int,
        position_ids: Tensor | None = None,
        prefix: str = "",
    ) -> "Packed":
        """A batch that arrives packed, with ids of shape (1, T). prefix: of the inputs' names in errors."""
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"{prefix}cu_seqlens: got shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}, expected "
                "(sequences + 1,) of int32, starting at 0 and ending at the number of tokens"
            )
        lengths = None
        if (known := host_copy(cu_seqlens)).device.type == "cpu":  # on a GPU this check would wait for the device
            ends = known.tolist()
            lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
            if ends[0] != 0 or ends[-1] != tokens or min(lengths, default=0) < 0:
                raise ValueError(
                    f"{prefix}cu_seqlens: got {ends[:3]}...{ends[-1]} for {tokens} tokens; expected rising offsets "
                    f"from 0 to {tokens}"
                )
            max_seqlen = max(lengths, default=0)
        elif max_seqlen is None:
            max_seqlen = int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if cu_seqlens.numel() > 1 else 0
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()  # as kernels require
        if position_ids is not None:
            positions = flat_positions(position_ids, (1, tokens), prefix)
        else:
            seqlens = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
            starts = torch.repeat_interleave(cu_seqlens[:-1].long(), seqlens, output_size=tokens)
            positions = torch.arange(tokens, device=cu_seqlens.device) - starts
        sequences = Sequences(cu_seqlens, int(max_seqlen), lengths)
        return cls(sequences, InputLayout((1, tokens), packed=True), positions)

    @classmethod
    def from_mask(
        cls,
        shape: tuple[int, int],
        attention_mask: Tensor | None,
        device: torch.device,
        position_ids: Tensor | None = None,
        count: bool = False,
        prefix: str = "",
    ) -> "Packed":
        """A padded batch, with ids of shape (batch, seq); attention_mask (batch, seq) is 1 at tokens and 0 at padding.

        Positions are columns or, with `count`, the number of earlier tokens in the row. prefix: of the inputs' names in
        errors.
        """
        batch, seq = shape
        if attention_mask is None:
            positions = torch.arange(seq, device=device).repeat(batch)
            if position_ids is not None:
                positions = flat_positions(position_ids, shape, prefix)
            cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * seq
            return cls(Sequences(cu, seq, [seq] * batch), InputLayout((batch, seq)), positions)
        if tuple(attention_mask.shape) != (batch, seq):
            raise ValueError(
                f"{prefix}attention_mask: got shape {tuple(attention_mask.shape)}, expected {(batch, seq)}: 1 at "
                "tokens, 0 at padding. Lengths become a mask by torch.arange(seq) < lengths[:, None]; packed rows take "
                f"{prefix}cu_seqlens"
            )
        mask = attention_mask.bool()
        if attention_mask.dtype != torch.bool and attention_mask.device.type == "cpu":
            if not torch.equal(attention_mask, mask.to(attention_mask.dtype)):
                raise ValueError(
                    f"{prefix}attention_mask: got values from {attention_mask.min().item()} to "
                    f"{attention_mask.max().item()}, expected only 1 (token) and 0 (padding)"
                )
        seqlens = mask.sum(1, dtype=torch.int32)
        lengths: list[int] = seqlens.tolist()
        cu = torch.nn.functional.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        indices = None if sum(lengths) == batch * seq else mask.flatten().nonzero().flatten()
        if position_ids is not None:
            positions = flat_positions(position_ids, shape, prefix)
            positions = positions if indices is None else positions[indices]
        elif count and indices is not None:
            starts = torch.repeat_interleave(cu[:-1], seqlens, output_size=indices.numel())
            positions = torch.arange(indices.numel(), device=device) - starts
        else:
            positions = (torch.arange(batch * seq, device=device) if indices is None else indices) % max(seq, 1)
        sequences = Sequences(cu, max(lengths, default=0), lengths)
        return cls(sequences, InputLayout((batch, seq), indices), positions)

    # -- the same batch, changed ---------------------------------------------------------------------------------------

    def with_prefix(self, count: int, first: int = 0) -> "Packed":
        """The batch with `count` tokens of the model's own before each sequence, at positions `first` and up."""
        n, tokens, s = self.num_sequences, self.num_tokens, self.sequences
        device = s.cu_seqlens.device
        seqlens = s.cu_seqlens[1:] - s.cu_seqlens[:-1]
        number = torch.repeat_interleave(torch.arange(n, device=device), seqlens, output_size=tokens)
        of_caller = torch.arange(tokens, device=device) + (number + 1) * count
        place = torch.arange(count, device=device).repeat(n)
        positions = place.new_zeros(tokens + n * count).index_copy(0, of_caller, self.positions + count)
        own = (s.cu_seqlens[:-1] + torch.arange(n, device=device) * count).repeat_interleave(count) + place
        return replace(
            self,
            sequences=Sequences(
                s.cu_seqlens + torch.arange(n + 1, dtype=torch.int32, device=device) * count,
                s.max_seqlen + count if n else 0,
                None if s.lengths is None else [length + count for length in s.lengths],
            ),
            layout=replace(self.layout, caller_tokens=of_caller, prefix_tokens=own, prefix_length=count if n else 0),
            positions=positions.index_copy(0, own, place + first),
        )

    def attending_to(self, mask: Tensor) -> "Packed":
        """The batch in which no token attends to those where `mask` (1, T) is 0, which themselves attend to the others.

        They are the last ones of their sequences, so that places in the sequence stay what they are. Nothing is read
        from a GPU if the mask and the offsets have copies on the host.

        Raises:
            ValueError: the mask has another shape, has 1 behind 0 in a sequence, or leaves one without an attended
                token; ranks share the tokens of a sequence.
        """
        if tuple(mask.shape) != self.shape:
            raise ValueError(
                f"attention_mask: got shape {tuple(mask.shape)} beside cu_seqlens, expected {self.shape}: 0 at tokens "
                "that no token attends to"
            )
        seen = host_copy(mask).flatten().cpu().bool()
        if bool(seen.all()):
            return self
        lengths = self.sequences.host_lengths()
        counts = [int(part.sum()) for part in seen.split(lengths)]
        first = [
            bool(part[:count].all()) and count > 0 for part, count in zip(seen.split(lengths), counts, strict=True)
        ]
        if not all(first):
            raise ValueError(
                f"attention_mask: sequence {first.index(False)} has 1 behind 0 or no 1; beside cu_seqlens, only the "
                "last tokens of a sequence may have 0"
            )
        device = self.cu_seqlens.device
        of = Sequences(to_device(Sequences.of_lengths(counts, seen.device).cu_seqlens, device), max(counts), counts)
        return replace(self, attended=(to_device(seen.nonzero().flatten(), device), of))

    def with_draws(self) -> "Packed":
        """The batch with dropout masks drawn by row and position, if the training loop has named the rows."""
        return replace(self, draws=draws_of(self.cu_seqlens, self.num_tokens))

    def split_over(self, split: Any) -> "Packed":
        """The batch for one of the ranks that share the tokens by `split`."""
        s, dummy = self.sequences, split.padding(self.num_tokens)
        cu, lengths = s.cu_seqlens, s.lengths
        if dummy:
            cu = torch.cat([cu, cu[-1:] + dummy])
            lengths = None if lengths is None else [*lengths, dummy]
        draws = self.draws
        if draws is not None:
            all_tokens = torch.nn.functional.pad(draws.tokens, (0, dummy))
            mine = split.local(all_tokens)
            part = split.of_units(mine)
            draws = replace(draws, tokens=mine, parts=(part,), every=all_tokens)
        return replace(
            self,
            sequences=Sequences(cu, max(s.max_seqlen, dummy), lengths, dummy),
            positions=split.local(torch.nn.functional.pad(self.positions, (0, dummy))),
            split=split,
            draws=draws,
        )

    def with_outputs(self, tokens: Tensor | None) -> "Packed":
        """The batch for a unit of whose output only the states of `tokens` (m,), ascending indices, are used.

        Attention still reads all tokens; after that the unit computes only these (`narrow`), and returns zeros for the
        rest (`widen`). If dropout, which identifies tensors by their number of rows, would confuse them with another
        part, all are computed.
        """
        if tokens is self.output_tokens:
            return self
        draws = self.draws
        if draws is not None and tokens is not None:
            if any(part.numel() == tokens.numel() for part in draws.parts):
                return self
            draws = replace(draws, parts=(*draws.parts, draws.tokens.index_select(0, tokens)))
        return replace(self, output_tokens=tokens, draws=draws)

    def of_run(self, number: int) -> "Packed":
        """The batch for one of several runs of a unit, each of which draws dropout masks of its own."""
        return self if self.draws is None else replace(self, draws=self.draws.of_run(number))

    def attend_to(self, states: Tensor, encoder: "Packed") -> None:
        """Set the encoder states, `memory`, that cross-attention reads.

        Lengths are checked only if the host knows them, since reading them from a GPU would wait for it.

        Raises:
            ValueError: a sequence of the batch has tokens, but the encoder's has none.
        """
        if self.sequences.lengths is not None and encoder.sequences.lengths is not None:
            self.sequences.paired_lengths(encoder.sequences)
        self.memory, self.memory_draws = (states, encoder.sequences), encoder.draws

    def narrow(self, x: Tensor) -> Tensor:
        """(T, ...) -> (m, ...), the rows of `output_tokens`."""
        return x if self.output_tokens is None else x.index_select(0, self.output_tokens)

    def widen(self, x: Tensor) -> Tensor:
        """(m, ...) for `output_tokens` -> (T, ...), zeros elsewhere."""
        if self.output_tokens is None:
            return x
        return x.new_zeros(self.num_tokens, *x.shape[1:]).index_copy(0, self.output_tokens, x)

    def scaled(self, x: Tensor) -> Tensor:
        """x times `branch_scale`."""
        return x if self.branch_scale == 1.0 else x * self.branch_scale

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def cu_seqlens(self) -> Tensor:
        """(n + 1,) int32, see layers.sequences; if there is a dummy sequence, its end follows."""
        return self.sequences.cu_seqlens

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence, or more."""
        return self.sequences.max_seqlen

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, including those in the cache."""
        return self.sequences.max_seqlen + (0 if self.cache is None else len(self.cache))

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, seq) of a padded input, or (1, T) of a packed one."""
        return self.layout.shape

    @property
    def num_tokens(self) -> int:
        """Tokens on this rank."""
        return self.positions.numel()

    @property
    def num_sequences(self) -> int:
        """Sequences of the batch, without the dummy."""
        return self.sequences.num_sequences

    @property
    def in_input_order(self) -> bool:
        """Whether the tokens are the input's, in its order: without padding and, if several ranks share them, without
        tokens of the model's own in between."""
        shared = self.split is not None and self.split.size > 1
        return self.layout.indices is None and not (shared and self.layout.caller_tokens is not None)

    # -- between the caller's tensors and the tokens -------------------------------------------------------------------

    def unpad(self, x: Tensor, fill: int = 0, prefix: Tensor | None = None, name: str = "a tensor") -> Tensor:
        """(batch, seq, ...) or (1, T, ...) -> (T, ...), with `fill` at dummy tokens and at the model's own tokens.

        prefix: (count, ...) for the model's own tokens before each sequence, in place of `fill`. name: of x in errors.

        Raises:
            ValueError: x has not the shape of the input.
        """
        x = self.layout.unpad(x, fill, prefix, name)
        if self.split is None:
            return x
        if dummy := self.sequences.dummy:
            x = torch.cat([x, x.new_full((dummy, *x.shape[1:]), fill)])
        return self.split.local(x)

    def repad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(T, ...) -> (batch, seq, ...) with `fill` at padding, or (1, T, ...)."""
        return self.layout.repad(self.gather(x), fill)

    def pad_by_sequence(self, x: Tensor, fill: float) -> Tensor:
        """(T,) -> (n, longest), the caller's tokens left-aligned and padded with `fill`, for a softmax over each
        sequence."""
        layout, before = self.layout, self.layout.prefix_length
        x = layout.of_caller(self.gather(x))
        if layout.indices is None and not layout.packed:
            return x.view(layout.shape)
        n, longest = self.num_sequences, max(self.max_seqlen - before, 0)
        seqlens = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()[:n] - before
        return in_rows(x, seqlens, longest, fill)

    def first_tokens(self) -> Tensor:
        """(n,) index of each sequence's first token. Raises ValueError if a sequence has none."""
        return self.sequences.first_tokens()

    def last_tokens(self) -> Tensor:
        """(n,) index of each sequence's last token. Raises ValueError if a sequence has none.

        If rows without padding hold several sequences, the index of each row's last token.
        """
        rows, seq = self.shape
        if not self.layout.packed and self.layout.indices is None and self.num_sequences != rows:
            return torch.arange(1, rows + 1, device=self.cu_seqlens.device) * seq - 1
        return self.sequences.last_tokens()

    def last_of(self, kept: Tensor) -> Tensor:
        """(n,) index, among all tokens, of each sequence's last token that is `kept`; -1 if it has none.

        kept: (batch, seq) or packed (1, T), bool; it may be on the host if the offsets are known there.
        """
        layout = self.layout
        flat = kept.flatten() if layout.indices is None else kept.flatten().index_select(0, layout.indices)
        ends = host_copy(self.cu_seqlens)
        ends = (ends if ends.device == flat.device else self.cu_seqlens)[1 : self.num_sequences + 1].long()
        of_caller = layout.caller_tokens
        numbers = torch.arange(flat.numel(), device=flat.device) if of_caller is None else of_caller
        rows = torch.searchsorted(ends, numbers, right=True)
        return ends.new_full(ends.shape, -1).scatter_reduce(0, rows, numbers.masked_fill(~flat, -1), "amax")

    # -- over the ranks that share the tokens --------------------------------------------------------------------------

    def gather(self, x: Tensor) -> Tensor:
        """This rank's (T, ...) -> that of all tokens, without the dummy sequence."""
        if self.split is None:
            return x
        x = self.split.gather(x)
        return x[: x.shape[0] - self.sequences.dummy]

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """A sum over this rank's tokens -> the sum over all tokens."""
        return x if self.split is None else self.split.sum(x)

    def greatest_over_ranks(self, x: Tensor) -> Tensor:
        """(n, width) greatest values among this rank's tokens -> those among all tokens."""
        split = self.split
        if split is None or split.size == 1:
            return x
        return split.gather(x).view(split.size, *x.shape).amax(0)

    @property
    def first_own_token(self) -> int:
        """The index, among all tokens, of this rank's first."""
        return 0 if self.split is None else self.split.rank * self.num_tokens

    def sequence_of(self, tokens: Tensor | None = None) -> Tensor:
        """(m,) the index of the sequence that each of this rank's `tokens` (m,) belongs to; None: for all its tokens.
        Tokens of the dummy sequence get n."""
        if tokens is None:
            tokens = torch.arange(self.num_tokens, device=self.cu_seqlens.device)
        places = (tokens + self.first_own_token).to(self.cu_seqlens.dtype)
        return torch.searchsorted(self.cu_seqlens[1:].contiguous(), places, right=True)

    def sum_by_sequence(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """(n, ...) the sum, over each sequence, of x (m, ...), which are values of this rank's `tokens` (m,); None: of
        all its tokens."""
        sums = x.new_zeros(self.num_sequences + 1, *x.shape[1:])  # the last row is for the dummy sequence
        sums = sums.index_add(0, self.sequence_of(tokens), x)
        return self.sum_over_ranks(sums[:-1])

    def mean_by_sequence(self, x: Tensor) -> Tensor:
        """(n, ...) the mean of x (T, ...) over each sequence's tokens, summed in fp32. Raises ValueError if a sequence
        has none."""
        first = self.first_tokens()
        counts = self.cu_seqlens[1 : self.num_sequences + 1] - first
        return (self.sum_by_sequence(x.float()) / counts.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)

    def of_this_rank(self, places: Tensor) -> Tensor:
        """Those of the tokens with these indices in the input (`in_input_order`; on the host) that are this rank's, as
        local indices."""
        if self.split is None or self.split.size == 1:
            return places
        places = places - self.split.rank * self.num_tokens
        return places[(places >= 0) & (places < self.num_tokens)]

    def select(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Rows of x (T, ...) by their indices among all tokens, on every rank that shares the tokens."""
        if self.split is None:
            return x.index_select(0, tokens)
        tokens = tokens - self.split.rank * x.shape[0]
        here = (tokens >= 0) & (tokens < x.shape[0])
        rows = x.index_select(0, tokens.clamp(0, x.shape[0] - 1)).masked_fill(~here[:, None], 0.0)
        self.split.leave()
        return self.split.sum(rows)
