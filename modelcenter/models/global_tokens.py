"""Windows and global tokens of Longformer and LED: their config fields, and what a batch says of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelcenter.config import ModelConfig
from modelcenter.layers.global_tokens import GlobalTokens
from modelcenter.layers.host_copies import host_copy
from modelcenter.layers.packing import Packed
from modelcenter.models.inputs import GLOBAL_MASK, Batch


@dataclass(kw_only=True)
class WindowFields(ModelConfig):
    """Fields of models with windows.

    attention_window: distance between the farthest tokens on both sides of a window, one for all layers (of an
    encoder-decoder, those of the encoder) or one for each; even.
    """

    num_layers: int
    attention_window: int | list[int] = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        windows = self.windows()
        even = len(windows) == self.num_layers and all(width > 0 and width % 2 == 0 for width in windows)
        self.require(even, "attention_window", f"an even number above 0, or {self.num_layers} of them, one per layer")

    def windows(self) -> list[int]:
        """attention_window of each layer."""
        given = self.attention_window
        return list(given) if isinstance(given, list) else [given] * self.num_layers

    def reaches(self) -> list[int]:
        """Of each layer, the number of positions from which on a token does not see another."""
        return [width // 2 + 1 for width in self.windows()]

    def fields_of_kept_layers(self, numbers: Sequence[int], of_decoder: bool = False) -> dict[str, Any]:
        changes = super().fields_of_kept_layers(numbers, of_decoder)
        if isinstance(windows := self.attention_window, list) and not of_decoder:
            changes["attention_window"] = [windows[number] for number in numbers]
        return changes


def set_globals(ctx: Packed, tokens: Tensor | None) -> None:
    """Let tokens have global attention. tokens: as `marked_tokens` returns them; None: no token has it."""
    if tokens is not None and tokens.numel():
        ctx.globals = GlobalTokens(tokens, ctx.sequences)


def marked_tokens(batch: Batch, ctx: Packed) -> Tensor | None:
    """(g,) ascending indices, among all tokens, of those that the batch's mask marks as global, on the host; None: it
    has no such mask.

    Raises:
        ValueError: the mask does not fit the tokens, or has other values than 0 and 1.
    """
    if (mask := batch.get(GLOBAL_MASK)) is None:
        return None
    chosen = on_host(mask, ctx, GLOBAL_MASK)
    if not bool(((chosen == 0) | (chosen == 1)).all()):
        raise ValueError(
            f"{GLOBAL_MASK}: got values from {chosen.min().item()} to {chosen.max().item()}, expected only 1 (global) "
            "and 0 (attention within the window)"
        )
    return chosen.nonzero().flatten()


def ends_of_sequences(ctx: Packed) -> Tensor:
    """(n + 1,) offsets of the sequences of a batch, on the host."""
    return torch.tensor(ctx.sequences.starts()[: ctx.num_sequences + 1])


def on_host(x: Tensor, ctx: Packed, name: str) -> Tensor:
    """(T,) on the host: x (batch, seq) or packed (1, T), without padding. A GPU is waited for only if x has no copy."""
    known = host_copy(x)
    unpadded: Any = ctx.layout.unpad(known if ctx.layout.indices is None else x, name=name)
    return unpadded.cpu()
