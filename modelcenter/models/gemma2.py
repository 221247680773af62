"""Gemma 2 (arXiv:2408.00118), after transformers' Gemma2Model and its heads: Gemma 1 with norms before and after each
sublayer, a window in every second layer, and soft caps of attention scores and vocabulary logits.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.models.gemma import GemmaConfig, SandwichBody
from modelcenter.models.layer_types import LayerTypesFields


@dataclass(kw_only=True)
class Gemma2Config(GemmaConfig, LayerTypesFields):
    """Fields of Gemma 2.

    layer_types: for each layer "full_attention" or "sliding_attention", in which a token attends to `sliding_window`
    tokens, itself and those before it. None: alternating, starting with a window.
    query_pre_attn_scalar: scores are divided by its square root.
    attention_cap, logit_cap: a scaled score, or a vocabulary logit, x becomes cap tanh(x / cap). None: no cap.
    """

    model_type: ClassVar[str] = "gemma2"

    num_kv_heads: int | None = 4
    sliding_window: int = 4096
    query_pre_attn_scalar: int = 256
    attention_cap: float | None = 50.0
    logit_cap: float | None = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.sliding_window > 0, "sliding_window", "at least 1")
        self.require(self.query_pre_attn_scalar > 0, "query_pre_attn_scalar", "more than 0")
        for name in ("attention_cap", "logit_cap"):
            cap = getattr(self, name)
            self.require(cap is None or cap > 0, name, "more than 0, or none")

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0 if self.layer_types is None else super().slides(layer)


class Gemma2(SandwichBody):
    """Gemma 2 with the head of `task`."""

    config_class = Gemma2Config
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification", "token-classification")

    config: Gemma2Config

    def attention(self, layer: int, **options: Any) -> nn.Module:
        c = self.config
        return super().attention(
            layer,
            window=c.sliding_window if c.slides(layer) else None,
            scale=c.query_pre_attn_scalar**-0.5,
            cap=c.attention_cap,
        )

    def make_head(
        self, task: str, dropout: float = 0.0, logit_scale: float = 1.0, width: int | None = None
    ) -> nn.Module | None:
        head: Any = super().make_head(task, dropout, logit_scale, width)
        if task == "causal-lm":
            head.cap = self.config.logit_cap
        return head
