"""Random numbers for activations that are split over the ranks of a model-parallel group."""

from __future__ import annotations

import torch
from torch import Tensor


class RngStreams:
    """A stack of random streams that differ between ranks.

    Outside of these streams, the ranks of a model-parallel group draw the same numbers. A stream is seeded by a number
    drawn from the enclosing stream, so a recomputed block repeats it.
    """

    def __init__(self) -> None:
        self._outer: list[tuple[str, Tensor, Tensor | None]] = []  # kind of each stream, generator states around it

    def depth(self) -> int:
        return len(self._outer)

    def enter(self, kind: str, index: int) -> None:
        """Start the stream of rank ``index``, unless the innermost stream is already of this kind."""
        if self._outer and self._outer[-1][0] == kind:
            return
        common = int(torch.randint(2**48, ()))
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._outer.append((kind, torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None))
        seed = (common + (index + 1) * 0x9E3779B97F4A7C15) % 2**63
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)

    def leave(self, kind: str) -> None:
        """Return to the enclosing stream, unless the innermost stream is of another kind."""
        if self._outer and self._outer[-1][0] == kind:
            self.unwind(len(self._outer) - 1)

    def forget(self) -> None:
        """Drop streams that will never be left, such as those of a recomputation that stopped early."""
        self._outer.clear()

    def unwind(self, depth: int) -> None:
        """Leave all but the outermost ``depth`` streams."""
        while len(self._outer) > depth:
            _, cpu, gpu = self._outer.pop()
            torch.set_rng_state(cpu)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu)


rng_streams = RngStreams()
