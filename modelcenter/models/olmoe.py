"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060), after transformers' OlmoeModel: a mixture of experts in each
layer, and queries and keys that are normalised over all heads at once.
"""

from dataclasses import dataclass
from typing import ClassVar

from modelcenter.models.mixture import MixtureBody, MixtureConfig
from modelcenter.models.olmo2 import WideNormBody


@dataclass(kw_only=True)
class OlmoeConfig(MixtureConfig):
    """Fields of OLMoE. attention_bias: q, k, v and out have biases."""

    model_type: ClassVar[str] = "olmoe"

    max_positions: int = 4096
    norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    attention_bias: bool = False
    num_experts: int = 64
    experts_per_token: int = 8
    normalize_experts: bool = False
    router_aux_loss_coef: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.head_dim is not None
        whole = self.head_dim * self.num_heads == self.hidden_size
        self.require(whole, "head_dim", f"hidden_size / num_heads = {self.hidden_size / self.num_heads:g}")


class Olmoe(MixtureBody, WideNormBody):
    """OLMoE with the head of `task`."""

    config_class = OlmoeConfig
    tasks = ("base", "embedding", "multi-vector", "causal-lm")

    config: OlmoeConfig
