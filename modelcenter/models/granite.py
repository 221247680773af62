"""Granite 3 (IBM 2024), after transformers' GraniteModel and GraniteMoeModel: Llama, without and with mixtures of
experts, with scaled embeddings, branches, scores and logits.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.models.llama import Llama, LlamaBody, LlamaBodyConfig, LlamaConfig
from modelcenter.models.mixture import MixtureBody, MixtureConfig


@dataclass(kw_only=True)
class GraniteFactors(LlamaBodyConfig):
    """Fields of both. It is the last base of a config, whose other base has the defaults of fields of LlamaBodyConfig.

    embedding_multiplier: factor of the embeddings, the caller's too. residual_multiplier: of what each branch adds.
    attention_multiplier: of the attention scores, in place of 1 / sqrt(head_dim). logits_scaling: divides the logits.
    """

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.logits_scaling > 0, "logits_scaling", "more than 0")


@dataclass(kw_only=True)
class GraniteConfig(LlamaConfig, GraniteFactors):
    """Fields of Granite; the biases are Llama's."""

    model_type: ClassVar[str] = "granite"


@dataclass(kw_only=True)
class GraniteMoeConfig(MixtureConfig, GraniteFactors):
    """Fields of GraniteMoE. attention_bias: q, k, v and out have biases."""

    model_type: ClassVar[str] = "granitemoe"

    attention_bias: bool = False
    num_experts: int = 8
    experts_per_token: int = 2


class ScaledBody(LlamaBody):
    """LlamaBody with the factors of a config."""

    scales_given = True

    config: GraniteFactors

    @property
    def embedding_scale(self) -> float:
        return self.config.embedding_multiplier

    @property
    def branch_scale(self) -> float:
        return self.config.residual_multiplier

    @property
    def logit_scale(self) -> float:
        return 1.0 / self.config.logits_scaling

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, scale=self.config.attention_multiplier, **options)


class Granite(Llama, ScaledBody):
    """Granite with the head of `task`."""

    config_class = GraniteConfig
    tasks = ("base", "embedding", "multi-vector", "causal-lm")

    config: GraniteConfig


class GraniteMoe(MixtureBody, ScaledBody):
    """GraniteMoE with the head of `task`."""

    config_class = GraniteMoeConfig
    tasks = Granite.tasks

    config: GraniteMoeConfig

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, bias=self.config.attention_bias, **options)
