"""Mixtral (Jiang et al. 2024, arXiv:2401.04088), after transformers' MixtralModel and its heads: Mistral with a mixture
of experts in each layer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.models.mixture import MixtureBody, MixtureConfig


@dataclass(kw_only=True)
class MixtralConfig(MixtureConfig):
    """Fields of Mixtral. sliding_window: how many tokens a token attends to, including itself; None: no limit."""

    model_type: ClassVar[str] = "mixtral"

    num_kv_heads: int | None = 8
    max_positions: int = 131072
    rope_theta: float = 1000000.0
    norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_experts: int = 8
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.sliding_window is None or self.sliding_window > 0, "sliding_window", "at least 1, or None")


class Mixtral(MixtureBody):
    """Mixtral with the head of `task`."""

    config_class = MixtralConfig

    config: MixtralConfig

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, bias=False, window=self.config.sliding_window)
