"""The prompts of a call of `generate`, and the tokens of the texts that continue them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def positions_left(model: Any, longest: int) -> int | None:
    """The number of positions left after a prompt of `longest` tokens; None: unlimited."""
    if not model.bounded:
        return None
    before = 1 if getattr(model, "is_encoder_decoder", False) else longest + model.prefix_tokens
    return model.config.max_written_tokens - before


def guessed_mask(tokens: Tensor, pad: int) -> Tensor:
    """(rows, length) 0 at padding, guessed as in transformers; a row of padding only is taken as a prompt."""
    mask = tokens != pad
    return (mask | ~mask.any(1, keepdim=True)).long()


class Prompts:
    """The prompts of all rows.

    Attributes:
        input_ids: (rows, length). mask: (rows, length), 1 at the prompts' tokens. lengths: tokens of each prompt.
        token_inputs: further inputs of forward, (rows, length) each. banned: (rows, vocabulary) bool, or None.
    """

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        token_inputs: Mapping[str, Tensor] | None = None,
        banned: Tensor | None = None,
    ):
        """Raises ValueError if the mask or an input has another shape, or a prompt has no tokens."""
        mask = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).long()
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask: got shape {tuple(mask.shape)}, expected {tuple(input_ids.shape)}")
        self.lengths: list[int] = mask.sum(1).tolist()
        if 0 in self.lengths:
            raise ValueError(
                f"attention_mask: row {self.lengths.index(0)} has no tokens; each prompt needs at least one"
            )
        for name, value in (token_inputs or {}).items():
            if value.shape != input_ids.shape:
                raise ValueError(
                    f"{name}: got shape {tuple(value.shape)}, expected {tuple(input_ids.shape)}, one value per token; "
                    "pass inputs that are not per token in other_inputs"
                )
        self.input_ids, self.mask, self.banned = input_ids, mask, banned
        self.token_inputs = dict(token_inputs or {})

    def __len__(self) -> int:
        return len(self.lengths)

    def packed(self, rows: Sequence[int], most: int | None = None) -> dict[str, Any]:
        """The prompts of some rows as a packed batch; only the first `most` tokens of each, if given."""
        index = torch.tensor(rows, device=self.input_ids.device)
        kept = self.mask[index].bool()
        lengths = [self.lengths[row] for row in rows]
        if most is not None:
            kept &= kept.cumsum(1) <= most
            lengths = [min(length, most) for length in lengths]
        batch = packed_rows(self.input_ids[index], kept, max(lengths))
        return {**batch, **{name: value[index][kept][None] for name, value in self.token_inputs.items()}}

    def last_inputs(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """(n, 1) each: the token_inputs of the last tokens of some rows, which new tokens have, too."""
        if not self.token_inputs:
            return {}
        index = torch.tensor(rows, device=self.input_ids.device)
        places = torch.arange(self.mask.shape[1], device=self.mask.device)
        last = (self.mask[index] * places).argmax(1, keepdim=True)
        return {name: value[index].gather(1, last) for name, value in self.token_inputs.items()}


def packed_rows(tokens: Tensor, kept: Tensor, longest: int) -> dict[str, Any]:
    """The tokens (rows, length) where `kept` (rows, length) is True as a packed batch."""
    ends = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    return {"input_ids": tokens[kept][None], "cu_seqlens": ends, "max_seqlen": longest}


class Texts:
    """The tokens of sequences that are being written.

    Attributes:
        tokens: (n, start + room) the first tokens right-aligned before column `start`, then the new ones; -1 elsewhere.
        start: the number of columns for first tokens.
        lengths: first tokens of each sequence. counts: new tokens of each. Both are on the host.
    """

    def __init__(self, start: int, room: int, device: torch.device):
        self.start, self.room = start, room
        self.tokens = torch.empty(0, start + room, dtype=torch.long, device=device)
        self.lengths: list[int] = []
        self.counts: list[int] = []

    @property
    def used(self) -> int:
        """The number of columns up to the newest token."""
        return self.start + max(self.counts, default=0)

    def newest(self, count: int) -> Tensor:
        """(n, count) the newest tokens of each sequence, -1 before its first."""
        even = min(self.counts) == max(self.counts) and count <= self.used
        if even:
            return self.tokens[:, self.used - count : self.used]
        padded = torch.nn.functional.pad(self.tokens, (count, 0), value=-1)
        return padded.gather(1, self.ends()[:, None] + torch.arange(count, device=padded.device))

    def ends(self) -> Tensor:
        """(n,) the column after each sequence's newest token."""
        return torch.tensor([self.start + count for count in self.counts], device=self.tokens.device)

    def begun(self, tokens: Tensor, kept: Tensor, copies: int) -> "Texts":
        """New sequences, as wide as these: each row of tokens (rows, length), where `kept` (rows, length) is True, in
        `copies` sequences."""
        made = Texts(self.start, self.room, tokens.device)
        lengths = kept.sum(1)
        made.tokens = tokens.new_full((len(tokens), self.start + self.room), -1, dtype=torch.long)
        places = torch.arange(self.start + self.room, device=tokens.device)
        made.tokens[(places >= self.start - lengths[:, None]) & (places < self.start)] = tokens[kept].long()
        made.tokens = made.tokens.repeat_interleave(copies, 0)
        made.lengths = [length for length in lengths.tolist() for _ in range(copies)]
        made.counts = [0] * len(made.lengths)
        return made

    def append(self, tokens: Tensor, order: Tensor | None = None) -> None:
        """Append a token (n,) to each sequence; `order` (n,): the sequence that each one continues, which has as many
        tokens. A sequence that is full has its last token replaced."""
        if order is not None:
            self.tokens = self.tokens[order]
        self.counts = [min(count + 1, self.room) for count in self.counts]
        if min(self.counts) == max(self.counts):
            self.tokens[:, self.used - 1] = tokens
        else:
            self.tokens.scatter_(1, self.ends()[:, None] - 1, tokens[:, None])

    def select(self, index: Tensor) -> None:
        """Keep the sequences index (n',)."""
        self.tokens = self.tokens[index]
        self.lengths, self.counts = ([known[i] for i in index.tolist()] for known in (self.lengths, self.counts))

    def replace(self, index: Tensor, others: "Texts") -> None:
        """Replace the sequences index (n',) by others."""
        self.tokens[index] = others.tokens
        for i, length, count in zip(index.tolist(), others.lengths, others.counts, strict=True):
            self.lengths[i], self.counts[i] = length, count

    def new(self, rows: Sequence[int]) -> Tensor:
        """(len(rows), longest) the new tokens of some sequences, -1 after them."""
        longest = max((self.counts[row] for row in rows), default=0)
        index = torch.tensor(rows, device=self.tokens.device)
        return self.tokens[index, self.start : self.start + longest]
