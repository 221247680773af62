"""Mixtral (Jiang et al. 2024, arXiv:2401.04088), after transformers' MixtralModel and its heads: Mistral with a mixture
of experts in each layer.
"""

from dataclasses import dataclass
from typing import ClassVar

from modelcenter.models.mistral import Mistral, MistralConfig
from modelcenter.models.mixture import MixtureBody, MixtureConfig


@dataclass(kw_only=True)
class MixtralConfig(MixtureConfig, MistralConfig):
    """Fields of Mixtral."""

    model_type: ClassVar[str] = "mixtral"

    num_kv_heads: int | None = 8
    max_positions: int = 131072
    rope_theta: float = 1000000.0
    norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_experts: int = 8
    experts_per_token: int = 2


class Mixtral(MixtureBody, Mistral):
    """Mixtral with the head of `task`."""

    config_class = MixtralConfig

    config: MixtralConfig
