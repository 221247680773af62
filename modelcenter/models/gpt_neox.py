"""GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745), after transformers' GPTNeoXModel and its heads."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import ParallelBlock, PreNormBlock
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import Rotary
from modelcenter.models.decoder import Decoder
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class GPTNeoXConfig(ModelConfig):
    """Fields of GPT-NeoX; sizes count elements, dropouts are probabilities.

    rotary_fraction: share of a head's channels that are rotated. parallel_residual: attention and the feed-forward
    network read the same hidden states. rope_scaling: see layers.rotary.Rotary.
    """

    model_type: ClassVar[str] = "gpt_neox"

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rotary_fraction: float = 0.25
    parallel_residual: bool = True
    attention_bias: bool = True
    norm_eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float = 0.1
    initializer_range: float = 0.02
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size % self.num_heads == 0, "hidden_size", f"a multiple of num_heads={self.num_heads}")
        self.require_one_of("hidden_act", ACTIVATIONS)
        turning = self.rotary_dim
        self.require(turning > 0 and turning % 2 == 0, "rotary_fraction", "an even number of a head's channels")
        self.require_probabilities("dropout", "attention_dropout", "classifier_dropout")

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that are rotated."""
        return int(self.hidden_size // self.num_heads * self.rotary_fraction)


class GPTNeoX(Decoder):
    """GPT-NeoX with the head of `task`. Parameter names in the body do not depend on the task."""

    config_class = GPTNeoXConfig

    def __init__(self, config: GPTNeoXConfig, task: str = "base"):
        super().__init__(config, task)
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.embed_dropout = Dropout(config.dropout)
        self.rotary = Rotary(config.rotary_dim, config.rope_theta, config.rope_scaling, config.max_positions)
        self.layers = nn.ModuleList(self._block(config) for _ in range(config.num_layers))
        self.final_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.head = self.make_head(task, config.classifier_dropout)

    @staticmethod
    def _block(c: GPTNeoXConfig) -> nn.Module:
        attn = SelfAttention(c.hidden_size, c.num_heads, c.attention_dropout, bias=c.attention_bias, causal=True)
        mlp = MLP(c.hidden_size, c.intermediate_size, c.hidden_act)

        def norm() -> nn.Module:
            return LayerNorm(c.hidden_size, c.norm_eps)

        if c.parallel_residual:
            return ParallelBlock(attn, mlp, norm, c.dropout, mlp_norm=True)
        return PreNormBlock(attn, mlp, norm, c.dropout)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch)
        x = self.embed_dropout(self.embedded(batch, ctx, self.embed), ctx)
        length = self.rotary.length(batch.get("position_ids"), ctx.longest)
        ctx.rotary = self.rotary(ctx.positions, x.dtype, length)
        return x, ctx
