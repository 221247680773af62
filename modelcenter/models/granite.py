"""Granite 3 (IBM 2024), after transformers' GraniteModel: Llama with scaled embeddings, branches, scores and logits."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.models.llama import Llama, LlamaConfig


@dataclass(kw_only=True)
class GraniteConfig(LlamaConfig):
    """Fields of Granite; the biases are Llama's.

    embedding_multiplier: factor of the embeddings, the caller's too. residual_multiplier: of what each branch adds.
    attention_multiplier: of the attention scores, in place of 1 / sqrt(head_dim). logits_scaling: divides the logits.
    """

    model_type: ClassVar[str] = "granite"

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.logits_scaling > 0, "logits_scaling", "more than 0")


class Granite(Llama):
    """Granite with the head of `task`."""

    config_class = GraniteConfig
    tasks = ("base", "embedding", "multi-vector", "causal-lm")

    scales_given = True

    config: GraniteConfig

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
