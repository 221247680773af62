"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): pairs of channels turned by position * frequency."""

import math
from typing import Any

import torch
from torch import Tensor


class Rotary:
    """Angles of each position.

    Args:
        dim: channels of a head that turn (the first ones); even. theta: base of the frequencies.
        scaling: Hugging Face's rope parameters: {"rope_type": "default" | "linear" | "dynamic" | "llama3" | "yarn" ...}
            Supported: "default", "linear" (factor) and "llama3" (factor, low_freq_factor, high_freq_factor,
            original_max_position_embeddings).

    Raises:
        ValueError: a kind of scaling that is not supported, naming those that are.
    """

    KINDS = ("default", "linear", "llama3")

    def __init__(self, dim: int, theta: float, scaling: dict[str, Any] | None = None):
        scaling = scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in self.KINDS:
            raise ValueError(f"rope_scaling: rope_type is {kind!r}, expected one of {', '.join(self.KINDS)}")
        self.dim, self.theta, self.kind, self.scaling = dim, theta, kind, scaling

    def frequencies(self, device: torch.device) -> Tensor:
        """(dim / 2,) fp32, radians per place."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.int64, device=device).float()
        turns = 1.0 / self.theta ** (steps / self.dim)
        if self.kind == "linear":
            return turns / self.scaling["factor"]
        if self.kind == "llama3":
            return self._llama3(turns)
        return turns

    def _llama3(self, turns: Tensor) -> Tensor:
        """Slow pairs are slowed further, fast ones are not, those between are blended (Llama 3.1)."""
        s = self.scaling
        low, high, length = s["low_freq_factor"], s["high_freq_factor"], s["original_max_position_embeddings"]
        waves = 2 * math.pi / turns
        blend = ((length / waves - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * turns / s["factor"] + blend * turns

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (T,) -> cos and sin, each (T, 1, dim / 2)."""
        with torch.autocast(positions.device.type, enabled=False):
            angles = (positions.float()[:, None] * self.frequencies(positions.device))[:, None]
            return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor], head_dim: int, interleaved: bool = False) -> Tensor:
    """Turn the first channels of each head of x (T, heads * head_dim).

    Pairs are channels i and i + dim / 2 (GPT-NeoX, Llama), or with `interleaved` 2 i and 2 i + 1 (GPT-J).
    """
    cos, sin = rotary
    dim = 2 * cos.shape[2]
    heads = x.view(x.shape[0], -1, head_dim)
    turning = heads[..., :dim]
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    if dim < head_dim:
        out = torch.cat((out, heads[..., dim:]), -1)
    return out.view(x.shape)
