"""Tokens with global attention: in the layers of Longformer and LED they attend to all tokens of their sequence, and
all attend to them, while other tokens attend within a window."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from modelcenter.layers.host_copies import to_device
from modelcenter.layers.sequences import Sequences


@dataclass(frozen=True)
class FarSequence:
    """A sequence in which some query has a global token outside its window.

    Attributes:
        start, stop: of its tokens among all tokens. tokens: (g,) indices of its global tokens among all tokens.
    """

    start: int
    stop: int
    tokens: Tensor

    def blocks(self, step: int) -> Iterator[tuple[int, int]]:
        """(first, last + 1) of blocks of up to `step` tokens, among all tokens."""
        return ((low, min(low + step, self.stop)) for low in range(self.start, self.stop, step))

    def inside(self, low: int, high: int, window: int) -> Tensor:
        """(high - low, g) bool, True where the window of token low, low + 1, ... holds the global token."""
        return (torch.arange(low, high, device=self.tokens.device)[:, None] - self.tokens).abs() < window


class GlobalTokens:
    """Which tokens of a batch have global attention.

    Attributes:
        tokens: (g,) int64, their ascending indices among all tokens.
        sequences: where those of each sequence begin and end in `tokens`, as `of` does for all tokens.
        of: the sequences of the batch; if several ranks share the tokens, with the dummy sequence.
    """

    def __init__(self, tokens: Tensor, of: Sequences):
        """tokens: as above, on the host. of: has its offsets on the device of the model."""
        bounds = torch.searchsorted(tokens, torch.tensor(of.starts(), dtype=torch.int64))
        counts, device = bounds.diff().tolist(), of.cu_seqlens.device
        self._on_host, self.tokens, self.of = tokens, to_device(tokens, device), of
        self.sequences = Sequences(to_device(bounds.int(), device), max(counts, default=0), counts)

    def far(self, window: int) -> list[FarSequence]:
        """The sequences in which a token is `window` or more positions away from a global one.

        In the others, windows of this size hold all that a query attends to.
        """
        return self.sequences.derived(("far", window), lambda: self._find_far(window))

    def near(self, window: int) -> tuple[Tensor, Sequences]:
        """The (t,) indices of the tokens of the other sequences, and these sequences."""
        return self.sequences.derived(("near", window), lambda: self._find_near(window))

    def _find_far(self, window: int) -> list[FarSequence]:
        found, starts, bounds = [], self.of.starts(), self.sequences.starts()
        for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if first == last:
                continue
            start, stop, tokens = starts[i], starts[i + 1], self._on_host[first:last]
            if max(int(tokens[-1]) - start, stop - 1 - int(tokens[0])) >= window:
                found.append(FarSequence(start, stop, self.tokens[first:last]))
        return found

    def _find_near(self, window: int) -> tuple[Tensor, Sequences]:
        starts, device = self.of.starts(), self.tokens.device
        far = {sequence.start for sequence in self.far(window)}
        kept = [(a, b) for a, b in zip(starts, starts[1:], strict=False) if a not in far or a == b]
        index = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(a, b) for a, b in kept)])
        near = Sequences.of_lengths([b - a for a, b in kept], index.device)
        offsets = to_device(near.cu_seqlens, device)  # without waiting for a GPU
        return to_device(index, device), Sequences(offsets, near.max_seqlen, near.lengths)
