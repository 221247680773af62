"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): pairs of channels rotated by position * frequency."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from modelcenter.layers.host_copies import host_copy, to_device


class Rotary:
    """The angles of each position.

    Args:
        dim: the number of channels of a head that are rotated (the first ones); even. theta: base of the frequencies.
        scaling: Hugging Face's rope parameters: {"rope_type": "default" | "linear" | "dynamic" | "llama3" | "yarn" ...}
            The keys of KINDS are supported, with the fields that each needs. With "dynamic" and "longrope", a long
            sequence changes the frequencies of all sequences in its batch, as in transformers.
        max_positions: the number of positions of the model; the original number if `scaling` does not give it.

    Attributes:
        limit: if the longest sequence of a batch has more tokens than this, the frequencies change; may be infinite.

    Raises:
        ValueError: the kind of scaling is not supported, or one of its fields is missing; the message says what is
            expected.
    """

    KINDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "dynamic": ("factor",),
        "longrope": ("short_factor", "long_factor"),
        "yarn": ("factor",),
    }

    def __init__(self, dim: int, theta: float, scaling: dict[str, Any] | None = None, max_positions: int | None = None):
        scaling = scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in self.KINDS:
            raise ValueError(f"rope_scaling: rope_type is {kind!r}, expected one of {', '.join(self.KINDS)}")
        if missing := [name for name in self.KINDS[kind] if scaling.get(name) is None]:
            raise ValueError(f"rope_scaling: rope_type {kind!r} needs {', '.join(missing)}; got {scaling}")
        self.dim, self.theta, self.kind, self.scaling = dim, theta, kind, scaling
        self.original: int = scaling.get("original_max_position_embeddings") or max_positions or 0  # 0: not known
        self.amplitude = 1.0
        self.limit: float = max_positions if kind == "dynamic" and max_positions else math.inf
        if kind in ("llama3", "longrope", "yarn") and not self.original:
            raise ValueError(f"rope_scaling: rope_type {kind!r} needs original_max_position_embeddings; got {scaling}")
        if kind == "longrope":
            self._start_longrope(max_positions)
        if kind == "yarn":
            self.amplitude = self._yarn_amplitude()

    def _start_longrope(self, max_positions: int | None) -> None:
        """Set the factors of each pair, and the amplitude that compensates for a longer context (arXiv:2402.13753)."""
        s, original = self.scaling, self.original
        for name in ("short_factor", "long_factor"):
            if len(s[name]) != self.dim // 2:
                raise ValueError(f"rope_scaling: {name} has {len(s[name])} numbers, expected {self.dim // 2}")
        if list(s["short_factor"]) != list(s["long_factor"]):
            self.limit = original
        longer = s.get("factor") or (max_positions or original) / original
        amplitude = 1.0 if longer <= 1 else math.sqrt(1 + math.log(longer) / math.log(original))
        self.amplitude = amplitude if s.get("attention_factor") is None else s["attention_factor"]

    def _yarn_amplitude(self) -> float:
        """The factor that sharpens attention over a longer context (arXiv:2309.00071, section 3.4; with DeepSeek's two
        mscales)."""
        s = self.scaling
        if s.get("attention_factor") is not None:
            return s["attention_factor"]

        above, below = s.get("mscale"), s.get("mscale_all_dim")
        return mscale(s["factor"], above) / mscale(s["factor"], below) if above and below else mscale(s["factor"])

    def length(self, position_ids: Tensor | None, longest: int) -> int:
        """The length that determines the frequencies of a batch: the caller's largest position + 1, as in transformers,
        else the longest sequence. Positions are read only if the frequencies may change, because it synchronises."""
        if self.limit == math.inf or position_ids is None or not position_ids.numel():
            return longest
        return int(host_copy(position_ids).max()) + 1

    def frequencies(self, device: torch.device, longest: int = 0) -> Tensor:
        """(dim / 2,) fp32, radians per position. longest: the batch's `length`."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.int64, device=device).float()
        long, theta = longest > self.limit, self.theta
        if self.kind == "dynamic" and long:
            factor = self.scaling["factor"]
            theta *= (factor * longest / self.limit - (factor - 1)) ** (self.dim / (self.dim - 2))
        turns = 1.0 / theta ** (steps / self.dim)
        if self.kind == "linear":
            return turns / self.scaling["factor"]
        if self.kind == "llama3":
            return self._llama3(turns)
        if self.kind == "yarn":
            return self._yarn(self.theta ** (steps / self.dim))
        if self.kind == "longrope":
            factors = self.scaling["long_factor" if long else "short_factor"]
            factors = to_device(torch.tensor(factors, dtype=torch.float32), device)  # does not wait for a GPU
            return 1.0 / (factors * self.theta ** (steps / self.dim))
        return turns

    def _llama3(self, turns: Tensor) -> Tensor:
        """Llama 3.1: low frequencies are lowered further, high ones are kept, those between are interpolated."""
        s = self.scaling
        low, high, length = s["low_freq_factor"], s["high_freq_factor"], self.original
        waves = 2 * math.pi / turns
        blend = ((length / waves - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * turns / s["factor"] + blend * turns

    def _yarn(self, places: Tensor) -> Tensor:
        """places (dim / 2,), positions per radian -> radians per position.

        Pairs with many rotations in the original length are kept, those with few are slowed, with a ramp between.
        """
        s = self.scaling

        def pair(rotations: float) -> float:
            """The (fractional) index of the pair with this many rotations in the original length."""
            length = self.original / (rotations * 2 * math.pi)
            return self.dim * math.log(length) / (2 * math.log(self.theta))

        low, high = pair(s.get("beta_fast") or 32), pair(s.get("beta_slow") or 1)
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high = high + 0.001 if low == high else high  # a step, not a division by zero
        pairs = torch.arange(self.dim // 2, dtype=torch.float32, device=places.device)
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        return 1.0 / (s["factor"] * places) * (1 - kept) + 1.0 / places * kept

    def __call__(self, positions: Tensor, dtype: torch.dtype, longest: int = 0) -> tuple[Tensor, Tensor]:
        """positions (T,) -> cos and sin, each (T, 1, dim / 2). longest: see `frequencies`."""
        angles = (positions.float()[:, None] * self.frequencies(positions.device, longest))[:, None]
        return (self.amplitude * angles.cos()).to(dtype), (self.amplitude * angles.sin()).to(dtype)


class StoredRotary(nn.Module):
    """The angles of each position, from frequencies stored in the checkpoint, which may differ from the formula's:
    those of ESM-2 were rounded to fp16 in training. They are initialised by the formula, and stay in fp32 in a model of
    any dtype, because 16 bits would change the angles of far positions.

    dim, theta: as in Rotary.
    """

    frequencies: Tensor

    def __init__(self, dim: int, theta: float):
        super().__init__()
        self.formula = Rotary(dim, theta)
        self.register_buffer("frequencies", torch.empty(dim // 2, dtype=torch.float32))
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Set the frequencies to those of the formula."""
        self.frequencies.copy_(self.formula.frequencies(self.frequencies.device))

    def _apply(self, fn: Any, recurse: bool = True) -> "StoredRotary":
        before = self.frequencies
        super()._apply(fn, recurse)
        if self.frequencies.dtype != before.dtype:
            self.frequencies = before.to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (T,) -> cos and sin, each (T, 1, dim / 2)."""
        positions = positions.to(self.frequencies.device)  # a pipeline calls this while the model is on meta
        angles = (positions.float()[:, None] * self.frequencies)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def mscale(factor: float, by: float = 1.0) -> float:
    """YaRN's factor of queries and keys for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0
