"""The decoder of ModernBERT, as in Ettin (Weller et al. 2025, arXiv:2507.11412), after transformers'
ModernBertDecoderModel and its heads: ModernBERT's layers with causal attention, and ModernBERT's masked-language-model
head for the next token.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from modelcenter.layers.heads import DenseCausalLM, TransformedClassifier
from modelcenter.models.decoder import Decoder
from modelcenter.models.modernbert import ModernBertBody, ModernBertBodyConfig


@dataclass(kw_only=True)
class ModernBertDecoderConfig(ModernBertBodyConfig):
    """Fields of ModernBERT's decoder. A window holds local_attention // 2 tokens, the token itself and those before it,
    as in the training of the published models; the encoder's window has that many before a token."""

    model_type: ClassVar[str] = "modernbert-decoder"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.local_attention >= 2, "local_attention", "at least 2: a token sees half as many")

    @property
    def is_decoder(self) -> bool:
        return True

    def window(self, layer: int) -> int | None:
        return self.local_attention // 2 if self.slides(layer) else None


class ModernBertDecoder(ModernBertBody, Decoder):
    """ModernBERT's decoder with the head of `task`."""

    config_class = ModernBertDecoderConfig
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification")
    causal = True

    config: ModernBertDecoderConfig

    def __init__(self, config: ModernBertDecoderConfig, task: str = "base"):
        super().__init__(config, task)
        self.make_body()
        self.head = self.make_head(task)

    def make_head(
        self, task: str, dropout: float = 0.0, logit_scale: float = 1.0, width: int | None = None
    ) -> nn.Module | None:
        c = self.config
        match task:
            case "causal-lm":
                return self.vocabulary_head(DenseCausalLM)
            case "sequence-classification":
                return TransformedClassifier(
                    c.hidden_size,
                    c.num_labels,
                    c.classifier_dropout,
                    c.problem_type,
                    c.classifier_act,
                    c.norm_eps,
                    bias=c.classifier_bias,
                    norm_bias=c.norm_bias,
                )
        return super().make_head(task)
