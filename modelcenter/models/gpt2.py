"""GPT-2 (Radford et al. 2019), after transformers' GPT2Model and its heads."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from modelcenter.config import ModelConfig
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.packing import Packed
from modelcenter.models.base import Batch
from modelcenter.models.decoder import Decoder, scaled_residuals


@dataclass(kw_only=True)
class GPT2Config(ModelConfig):
    """Fields of GPT-2; sizes count elements, dropouts are probabilities."""

    model_type: ClassVar[str] = "gpt2"

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int | None = None  # 4 * hidden_size
    hidden_act: str = "gelu_new"
    max_positions: int = 1024
    norm_eps: float = 1e-5
    dropout: float = 0.1
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    scale_attention: bool = True
    scale_attention_by_layer: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size % self.num_heads == 0, "hidden_size", f"a multiple of num_heads={self.num_heads}")
        self.require(self.hidden_act in ACTIVATIONS, "hidden_act", f"one of {', '.join(ACTIVATIONS)}")
        for name in ("dropout", "embedding_dropout", "attention_dropout"):
            self.require(0 <= getattr(self, name) < 1, name, "a probability, 0 <= p < 1")

    def attention_scale(self, layer: int) -> float:
        """What the scores of layer 0, 1, ... are multiplied by."""
        scale = (self.hidden_size // self.num_heads) ** -0.5 if self.scale_attention else 1.0
        return scale / (layer + 1) if self.scale_attention_by_layer else scale


class GPT2(Decoder):
    """GPT-2 with the head of `task`. Body names do not depend on the task."""

    config_class = GPT2Config

    def __init__(self, config: GPT2Config, task: str = "base"):
        super().__init__(config, task)
        c, width = config, config.hidden_size
        self.embed = nn.Embedding(c.vocab_size, width)
        self.position = nn.Embedding(c.max_positions, width)
        self.embed_dropout = Dropout(c.embedding_dropout)
        self.layers = nn.ModuleList(
            PreNormBlock(
                SelfAttention(width, c.num_heads, c.attention_dropout, causal=True, scale=c.attention_scale(i)),
                MLP(width, c.intermediate_size or 4 * width, c.hidden_act),
                lambda: nn.LayerNorm(width, c.norm_eps),
                c.dropout,
            )
            for i in range(c.num_layers)
        )
        self.final_norm = nn.LayerNorm(width, c.norm_eps)
        self.head = self.make_head(task, 0.1 if c.classifier_dropout is None else c.classifier_dropout)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch)
        self.check_positions(batch, ctx, self.config.max_positions)
        x = self.embedded(batch, ctx, self.embed) + self.position(ctx.positions)
        return self.embed_dropout(x, ctx), ctx

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        return scaled_residuals(super().init_spec(), self.config.num_layers)
