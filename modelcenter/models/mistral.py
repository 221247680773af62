"""Mistral (Jiang et al. 2023, arXiv:2310.06825), after transformers' MistralModel and its heads."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.models.llama import LlamaBody, LlamaBodyConfig


@dataclass(kw_only=True)
class MistralConfig(LlamaBodyConfig):
    """Fields of Mistral. sliding_window: how many tokens a token attends to, including itself; None: no limit."""

    model_type: ClassVar[str] = "mistral"

    num_kv_heads: int | None = 8
    max_positions: int = 131072
    sliding_window: int | None = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.sliding_window is None or self.sliding_window > 0, "sliding_window", "at least 1, or None")


class Mistral(LlamaBody):
    """Mistral with the head of `task`."""

    config_class = MistralConfig

    config: MistralConfig

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, bias=False, window=self.config.sliding_window)
