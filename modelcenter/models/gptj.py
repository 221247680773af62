"""GPT-J (Wang and Komatsuzaki 2021), after transformers' GPTJModel and its heads."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import ParallelBlock
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import Rotary
from modelcenter.models.decoder import Decoder
from modelcenter.models.inputs import Batch

THETA = 10000.0  # base of the rotary frequencies; not a config field


@dataclass(kw_only=True)
class GPTJConfig(ModelConfig):
    """Fields of GPT-J; sizes count elements, dropouts are probabilities. rotary_dim: rotated channels of a head."""

    model_type: ClassVar[str] = "gptj"

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int | None = None  # 4 * hidden_size
    hidden_act: str = "gelu_new"
    max_positions: int = 2048
    rotary_dim: int = 64
    norm_eps: float = 1e-5
    dropout: float = 0.0
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size % self.num_heads == 0, "hidden_size", f"a multiple of num_heads={self.num_heads}")
        self.require_one_of("hidden_act", ACTIVATIONS)
        width = self.hidden_size // self.num_heads
        turning = isinstance(self.rotary_dim, int) and 0 < self.rotary_dim <= width and self.rotary_dim % 2 == 0
        self.require(turning, "rotary_dim", f"an even number of the {width} channels of a head")
        self.require_probabilities("dropout", "embedding_dropout", "attention_dropout")


class GPTJ(Decoder):
    """GPT-J with the head of `task`. Parameter names in the body do not depend on the task."""

    config_class = GPTJConfig
    bounded = True
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification", "question-answering")
    lm_bias = True

    config: GPTJConfig

    def __init__(self, config: GPTJConfig, task: str = "base"):
        super().__init__(config, task)
        c, width = config, config.hidden_size
        self.embed = Embedding(c.vocab_size, width)
        self.embed_dropout = Dropout(c.embedding_dropout)
        self.rotary = Rotary(c.rotary_dim, THETA)
        self.layers = nn.ModuleList(
            ParallelBlock(
                SelfAttention(width, c.num_heads, c.attention_dropout, bias=False, causal=True, interleaved=True),
                MLP(width, c.intermediate_size or 4 * width, c.hidden_act),
                lambda: LayerNorm(width, c.norm_eps),
                c.dropout,
            )
            for _ in range(c.num_layers)
        )
        self.final_norm = LayerNorm(width, c.norm_eps)
        self.head = self.make_head(task)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch)
        self.check_positions(batch, ctx, self.config.max_positions)
        x = self.embed_dropout(self.embedded(batch, ctx, self.embed), ctx)
        ctx.rotary = self.rotary(ctx.positions, x.dtype)
        return x, ctx
