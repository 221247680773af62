"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219) and Phi-4 (arXiv:2412.08905, 2503.01743), after transformers' Phi3Model
and its heads: Llama's body with a sliding window, of whose heads only a part may be rotated.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.rotary import Rotary
from modelcenter.models.llama import LlamaBody, LlamaBodyConfig

_SCALINGS = ("default", "longrope")  # those of transformers' Phi3Config


@dataclass(kw_only=True)
class Phi3Config(LlamaBodyConfig):
    """Fields of Phi-3 and Phi-4.

    rotary_fraction: share of a head's channels, the first ones, that are rotated. original_max_positions: with longrope
    scaling, the length from which the long factors apply. sliding_window: how many tokens a token attends to, including
    itself; None: no limit. dropout: of what attention and the feed-forward network add to the residual stream.
    """

    model_type: ClassVar[str] = "phi3"

    max_positions: int = 4096
    original_max_positions: int = 4096
    rotary_fraction: float = 1.0
    norm_eps: float = 1e-5
    sliding_window: int | None = None
    dropout: float = 0.0
    pad_token_id: int | None = 32000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.sliding_window is None or self.sliding_window > 0, "sliding_window", "at least 1, or None")
        self.require_probabilities("dropout")
        turning, whole = self.rotary_dim, self.head_dim
        assert whole is not None
        self.require(
            0 < turning <= whole and turning % 2 == 0, "rotary_fraction", f"a share of {whole} channels, an even number"
        )
        self.require(self.original_max_positions > 1, "original_max_positions", "at least 2")
        kind = (self.rope_scaling or {}).get("rope_type", "default")
        self.require(kind in _SCALINGS, "rope_scaling", f"a rope_type of {' or '.join(_SCALINGS)}")

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that are rotated."""
        assert self.head_dim is not None
        return int(self.head_dim * self.rotary_fraction)


class Phi3(LlamaBody):
    """Phi-3 or Phi-4 with the head of `task`."""

    config_class = Phi3Config
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification", "token-classification")

    config: Phi3Config

    def __init__(self, config: Phi3Config, task: str = "base"):
        super().__init__(config, task)
        self.rereads_beyond = self.rotary.limit  # as transformers: keys of the short factors do not fit the long ones

    def make_rotary(self) -> Rotary:
        c = self.config
        scaling = c.rope_scaling and {**c.rope_scaling, "original_max_position_embeddings": c.original_max_positions}
        return Rotary(c.rotary_dim, c.rope_theta, scaling, c.max_positions)

    def block(self, layer: int) -> nn.Module:
        c = self.config
        return PreNormBlock(self.attention(layer), self.mlp(layer), lambda: self.norm(c.hidden_size), c.dropout)

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, bias=False, window=self.config.sliding_window)
